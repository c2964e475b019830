-- Invalidations by writers that do not use the Rust crate: a function for SQL statements, and a function for triggers.
--
--     psql --set ON_ERROR_STOP=1 --file stampede_guard.sql
--
-- The functions are created in the first schema of the search path. The file may be executed again, and needs no superuser: only the
-- right to create functions in that schema. Both functions write a message into the log inside the caller's transaction, so a rollback
-- invalidates nothing, and a commit invalidates everything that was named. The messages are those of `stampede_guard_postgres::LogMessage`.
--
-- A key or tag has parts, as in Rust: the parts 'price' and '7' are the `CacheKey` of ("price", 7). A path is the text of its parts, one
-- directly after another.

-- Invalidates one name when the transaction is committed:
--
--     select stampede_guard_invalidate('key', 'price', '7');
--     select stampede_guard_invalidate('tag', 'catalog');
--     select stampede_guard_invalidate('path', '/product/7');
--     select stampede_guard_invalidate('all');
create or replace function stampede_guard_invalidate(kind text, variadic parts text[] default '{}')
returns void
language plpgsql
-- The last entry: by default the schema of temporary objects is searched first.
set search_path = pg_catalog, pg_temp
as $function$
declare
    message jsonb;
begin
    if kind is null or kind not in ('key', 'tag', 'path', 'all') then
        raise exception 'stampede_guard: % is no kind of name, so nothing is invalidated', coalesce(quote_literal(kind), 'NULL')
            using errcode = 'invalid_parameter_value', hint = 'Use ''key'', ''tag'', ''path'' or ''all''.';
    end if;
    if kind = 'all' and parts <> '{}' then
        raise exception 'stampede_guard: the kind ''all'' has no name, so nothing is invalidated'
            using errcode = 'invalid_parameter_value', hint = 'Use ''key'', ''tag'' or ''path'' for one name.';
    end if;
    if kind <> 'all' and (parts is null or parts = '{}' or parts = '{""}' or array_position(parts, null) is not null) then
        raise exception 'stampede_guard: an empty name, or one with a part that is NULL, so nothing is invalidated'
            using errcode = 'invalid_parameter_value', hint = 'Give the parts of the name after the kind.';
    end if;
    if kind = 'path' and not starts_with(array_to_string(parts, ''), '/') then
        raise exception 'stampede_guard: % is no path, so nothing is invalidated', quote_literal(array_to_string(parts, ''))
            using errcode = 'invalid_parameter_value', hint = 'A path begins with ''/''.';
    end if;
    message := case kind
        when 'key' then jsonb_build_object('keys', jsonb_build_array(parts))
        when 'tag' then jsonb_build_object('tags', jsonb_build_array(parts))
        when 'path' then jsonb_build_object('paths', jsonb_build_array(array_to_string(parts, '')))
        else jsonb_build_object('all', true)
    end;
    -- As bytes: a text would be written in the encoding of the database.
    perform pg_logical_emit_message(true, 'stampede-guard', convert_to(message::text, 'UTF8'));
end
$function$;

-- Invalidates a name for each changed row:
--
--     create trigger invalidate_price after insert or update or delete on products
--         for each row execute function stampede_guard_on_change('key', 'price', 'id');
--
-- The first argument is the kind, the last one is a column of the table, and those between are parts of the name. The last part of the
-- name is the text of the column: an update that changes the column names the value before and the value after. A row with NULL in the
-- column names nothing. For a column of a time or a number with fractions, the text depends on the type and the session: prefer columns
-- of integers, texts and UUIDs. In a path, the characters '%', '?' and '#' of the column are percent-encoded.
--
-- TRUNCATE calls no trigger of rows. In a trigger of statements, all arguments after the kind are parts of the name:
--
--     create trigger invalidate_prices after truncate on products
--         for each statement execute function stampede_guard_on_change('all');
--     create trigger invalidate_catalog after insert or update or delete or truncate on products
--         for each statement execute function stampede_guard_on_change('tag', 'catalog');
--
-- A role that changes the table needs no right on this function.
create or replace function stampede_guard_on_change()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $function$
declare
    kind constant text := tg_argv[0];
    has_column constant boolean := tg_level = 'ROW' and kind <> 'all';
    prefix constant text[] := coalesce(tg_argv[1 : tg_nargs - case when has_column then 2 else 1 end], '{}');
    column_text text;
    old_value text;
    new_value text;
    value text;
    parts text[];
    names jsonb := '[]';
begin
    if kind is null or kind not in ('key', 'tag', 'path', 'all') then
        raise exception 'stampede_guard: the trigger % has % as its kind of name', tg_name, coalesce(quote_literal(kind), 'none')
            using errcode = 'invalid_parameter_value', hint = 'Use ''key'', ''tag'', ''path'' or ''all''.';
    end if;
    if tg_when <> 'AFTER' then
        raise exception 'stampede_guard: the trigger % is %, when the values are not final', tg_name, tg_when
            using errcode = 'invalid_parameter_value', hint = 'Create it as an AFTER trigger.';
    end if;
    if (kind = 'all') <> (tg_nargs = 1) or (not has_column and prefix = '{""}') then
        raise exception 'stampede_guard: the trigger % has the kind % and % further arguments', tg_name, quote_literal(kind), tg_nargs - 1
            using errcode = 'invalid_parameter_value',
                hint = 'Use (''all''), (kind, parts.., column) for each row, or (kind, parts..) for each statement.';
    end if;
    if kind = 'path' and prefix <> '{}' and not starts_with(array_to_string(prefix, ''), '/') then
        raise exception 'stampede_guard: the trigger % names the path %', tg_name, quote_literal(array_to_string(prefix, ''))
            using errcode = 'invalid_parameter_value', hint = 'A path begins with ''/''.';
    end if;

    if has_column then
        -- The expression is evaluated for the row alone, so the other columns may have any type and size.
        column_text := format('select ($1).%I::text', tg_argv[tg_nargs - 1]);
        if tg_op <> 'INSERT' then
            execute column_text into old_value using old;
        end if;
        if tg_op <> 'DELETE' then
            execute column_text into new_value using new;
        end if;
        for value in select distinct v from unnest(array[old_value, new_value]) as v where v is not null loop
            if kind = 'path' and prefix <> '{}' then
                value := replace(replace(replace(value, '%', '%25'), '?', '%3F'), '#', '%23');
            end if;
            parts := prefix || value;
            -- No entry has an empty name.
            if parts <> '{""}' then
                names := names || jsonb_build_array(
                    case kind when 'path' then to_jsonb(array_to_string(parts, '')) else to_jsonb(parts) end
                );
            end if;
        end loop;
        if names = '[]' then
            return null;
        end if;
    else
        names := jsonb_build_array(case kind when 'path' then to_jsonb(array_to_string(prefix, '')) else to_jsonb(prefix) end);
    end if;

    -- Not by a call of `stampede_guard_invalidate`: it may be in another schema, and the role may lack the right to use that.
    perform pg_logical_emit_message(true, 'stampede-guard', convert_to(case kind
        when 'key' then jsonb_build_object('keys', names)
        when 'tag' then jsonb_build_object('tags', names)
        when 'path' then jsonb_build_object('paths', names)
        else jsonb_build_object('all', true)
    end::text, 'UTF8'));
    return null;
end
$function$;
