//! Runs a client's script in Lua 5.1, with the functions that Redis adds to it.

use std::cell::RefCell;
use std::collections::HashMap;

use mlua::{Function, Lua, MultiValue, Table, Value};

use super::data::{Answer, Data};

thread_local! {
    /// As in Redis, one interpreter for all scripts, each of which is compiled once.
    static INTERPRETER: (Lua, RefCell<HashMap<Vec<u8>, Function>>) = Default::default();
}

/// Runs a script on the data. If it fails, the Lua error is the reply, as in Redis.
pub(super) fn run(data: &RefCell<Data>, text: &[u8], keys: &[Vec<u8>], argv: &[Vec<u8>]) -> Answer {
    INTERPRETER.with(|(lua, compiled)| {
        let known = compiled.borrow().get(text).cloned();
        let script = known.map_or_else(|| lua.load(text).into_function(), Ok);
        let script = script.expect("a script of the client is Lua");
        compiled.borrow_mut().entry(text.to_vec()).or_insert_with(|| script.clone());
        run_in(lua, &script, data, keys, argv)
    })
}

fn run_in(lua: &Lua, script: &Function, data: &RefCell<Data>, keys: &[Vec<u8>], argv: &[Vec<u8>]) -> Answer {
    let done = lua.scope(|scope| {
        let redis = lua.create_table()?;
        let call = scope.create_function(|lua, words: MultiValue| {
            let answer = data.borrow_mut().run(&texts(words)?);
            match answer {
                Answer::Error(text) => Err(mlua::Error::runtime(text)),
                answer => to_lua(lua, answer),
            }
        })?;
        let pcall = scope.create_function(|lua, words: MultiValue| {
            let answer = data.borrow_mut().run(&texts(words)?);
            to_lua(lua, answer)
        })?;
        redis.set("call", call)?;
        redis.set("pcall", pcall)?;
        let error_reply = |lua: &Lua, text: mlua::LuaString| {
            let table = lua.create_table()?;
            table.set("err", text)?;
            Ok(table)
        };
        redis.set("error_reply", lua.create_function(error_reply)?)?;
        let globals = lua.globals();
        globals.set("redis", redis)?;
        for (name, words) in [("KEYS", keys), ("ARGV", argv)] {
            let words = words.iter().map(|word| lua.create_string(word)).collect::<mlua::Result<Vec<_>>>()?;
            globals.set(name, words)?;
        }
        from_lua(script.call::<Value>(())?)
    });
    done.unwrap_or_else(|error| {
        // Redis reports this text, without Lua's stack trace.
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        let line = line.strip_prefix("runtime error: ").unwrap_or(line);
        let known = ["WRONGTYPE", "OOM", "READONLY"].iter().any(|code| line.starts_with(code));
        Answer::Error(if known { line.to_owned() } else { format!("ERR {line}") })
    })
}

pub(super) fn sha1(bytes: &[u8]) -> String {
    sha1_smol::Sha1::from(bytes).digest().to_string()
}

fn texts(words: MultiValue) -> mlua::Result<Vec<Vec<u8>>> {
    let text = |word: Value| match word {
        Value::String(text) => Ok(text.as_bytes().to_vec()),
        Value::Integer(number) => Ok(number.to_string().into_bytes()),
        // Redis passes a number of a script to a command in this format.
        Value::Number(number) => {
            Ok(format!("{number:.17}").trim_end_matches('0').trim_end_matches('.').into())
        }
        _ => Err(mlua::Error::runtime("Lua redis() command arguments must be strings or integers")),
    };
    words.into_iter().map(text).collect()
}

fn to_lua(lua: &Lua, answer: Answer) -> mlua::Result<Value> {
    let with = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.set(name, text)?;
        Ok(Value::Table(table))
    };
    match answer {
        Answer::Nil => Ok(Value::Boolean(false)),
        Answer::Int(number) => Ok(Value::Number(number as f64)),
        Answer::Bulk(bytes) => Ok(Value::String(lua.create_string(bytes)?)),
        Answer::Status(text) => with("ok", text),
        Answer::Error(text) => with("err", &text),
        Answer::List(parts) => {
            let parts = parts.into_iter().map(|part| to_lua(lua, part)).collect::<mlua::Result<Vec<_>>>()?;
            Ok(Value::Table(lua.create_sequence_from(parts)?))
        }
    }
}

fn from_lua(value: Value) -> mlua::Result<Answer> {
    Ok(match value {
        Value::Boolean(true) => Answer::Int(1),
        Value::Integer(number) => Answer::Int(number),
        // Redis truncates a number that a script returns, and does not round it, so the scripts must allow for that.
        Value::Number(number) => Answer::Int(number as i64),
        Value::String(text) => Answer::Bulk(text.as_bytes().to_vec()),
        Value::Table(table) => from_table(&table)?,
        _ => Answer::Nil,
    })
}

fn from_table(table: &Table) -> mlua::Result<Answer> {
    if let Some(text) = table.raw_get::<Option<String>>("err")? {
        return Ok(Answer::Error(text));
    }
    if table.raw_get::<Option<String>>("ok")?.is_some() {
        return Ok(Answer::Status("OK"));
    }
    let mut parts = Vec::new();
    loop {
        // In Redis, a list ends at its first nil.
        match table.raw_get::<Value>(parts.len() + 1)? {
            Value::Nil => return Ok(Answer::List(parts)),
            value => parts.push(from_lua(value)?),
        }
    }
}
