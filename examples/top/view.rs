//! What the terminal shows of a [`Model`]: a function of the model and the size, without a clock or a terminal.

use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};

use crate::PERIOD;
use crate::model::{Model, Process, Section, Trouble};
use crate::rates::{ByOutcome, OUTCOMES, Slot};
use crate::text::{DASH, bytes, columns, count, cut, duration, padded, rate, several};

const PLAIN: Style = Style::new();
const QUIET: Style = Style::new().add_modifier(Modifier::DIM);
const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);
const WARN: Style = Style::new().fg(Color::Yellow);
const BAD: Style = Style::new().fg(Color::Red);
/// Below the boxes if there is room.
const KEYS: &str = "q quit   p pause   tab next box   arrows, page up, page down scroll";
/// With fewer rows one panel is displayed at a time.
const ROWS_OF_ALL: u16 = 36;
/// With fewer columns the boxes of what happens now stand below each other.
const COLUMNS_OF_TWO: u16 = 150;
/// The width of a box from which on the list of processes has more details.
const COLUMNS_OF_DETAILS: usize = 120;
/// The most policies of which rates are displayed: the busiest.
const MOST_POLICIES: usize = 24;
/// The columns for the name of a process in a wide list.
const NAME_OF_WIDE: usize = 28;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The content of a section in a given width.
struct Content {
    title: String,
    head: Option<Line<'static>>,
    rows: Vec<Line<'static>>,
    foot: Option<Line<'static>>,
}

/// A column of a table: its title, its width, and whether it is for numbers, which are aligned to the right.
struct Column(&'static str, usize, bool);

type Cell = (String, Style);

/// Draws the whole screen.
pub(crate) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let [top, body, bottom] = parts(frame.area());
    frame.render_widget(Paragraph::new(vec![header(model), notice(model)]), top);
    for (section, area) in boxes(body, model) {
        let is_focused = section == model.focused();
        let content = content(section, model, inner(area.width));
        let visible = visible_rows(&content, area);
        let from = model.scrolls[section as usize].min(content.rows.len().saturating_sub(visible));
        let total = content.rows.len();
        let title = match visible {
            _ if total <= visible => format!(" {} ", content.title),
            _ => format!(" {} ({} to {} of {total}) ", content.title, from + 1, (from + visible).min(total)),
        };
        let rows = content.rows.into_iter().skip(from).take(visible);
        let lines: Vec<_> = content.head.into_iter().chain(rows).chain(content.foot).collect();
        let border = if is_focused { HEAD } else { QUIET };
        frame.render_widget(
            Paragraph::new(lines).block(Block::bordered().border_style(border).title(title)),
            area,
        );
    }
    frame.render_widget(Paragraph::new(Line::styled(KEYS, QUIET)), bottom);
}

/// All of the model as a text.
pub(crate) fn text(model: &Model, width: usize) -> String {
    let mut lines = vec![header(model)];
    lines.extend(Some(notice(model)).filter(|notice| notice.width() > 0));
    for section in Section::ALL {
        let Content { title, head, rows, foot } = content(section, model, width);
        lines.extend([Line::default(), Line::from(title)]);
        lines.extend(head.into_iter().chain(rows).chain(foot));
    }
    lines.iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect()
}

/// Moves the focus or scrolls.
pub(crate) fn press(model: &mut Model, key: KeyCode, screen: Rect) {
    let sections = Section::ALL.len();
    match key {
        KeyCode::Tab => model.focus = (model.focus + 1) % sections,
        KeyCode::BackTab => model.focus = (model.focus + sections - 1) % sections,
        _ => {}
    }
    let [_, body, _] = parts(screen);
    let section = model.focused();
    let Some((_, area)) = boxes(body, model).into_iter().find(|(of, _)| *of == section) else { return };
    let content = content(section, model, inner(area.width));
    let visible = visible_rows(&content, area);
    let most = content.rows.len().saturating_sub(visible);
    let from = model.scrolls[section as usize].min(most);
    let page = visible.max(1);
    model.scrolls[section as usize] = match key {
        KeyCode::Up => from.saturating_sub(1),
        KeyCode::Down => from + 1,
        KeyCode::PageUp => from.saturating_sub(page),
        KeyCode::PageDown => from + page,
        KeyCode::Home => 0,
        KeyCode::End => most,
        _ => from,
    }
    .min(most);
}

fn parts(screen: Rect) -> [Rect; 3] {
    let constraints = [Constraint::Length(2), Constraint::Fill(1), Constraint::Length(1)];
    Layout::vertical(constraints).areas(screen)
}

/// The columns inside of a box.
fn inner(width: u16) -> usize {
    usize::from(width.saturating_sub(2))
}

fn visible_rows(content: &Content, area: Rect) -> usize {
    inner(area.height).saturating_sub(content.fixed_rows())
}

impl Content {
    fn fixed_rows(&self) -> usize {
        usize::from(self.head.is_some()) + usize::from(self.foot.is_some())
    }
}

/// The boxes that have room, in their order on the screen.
fn boxes(body: Rect, model: &Model) -> Vec<(Section, Rect)> {
    let now = [Section::Loads, Section::Requests, Section::Hot];
    if body.height < ROWS_OF_ALL {
        return match model.focused() {
            Section::Processes => vec![(Section::Processes, body)],
            _ => stacked(&now, body, model),
        };
    }
    if body.width < COLUMNS_OF_TWO {
        return stacked(&Section::ALL, body, model);
    }
    let height = needed(Section::Processes, model, body.width).min(body.height / 2);
    let [above, below] = Layout::vertical([Constraint::Length(height), Constraint::Fill(1)]).areas(body);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(below);
    let mut boxes = vec![(Section::Processes, above)];
    boxes.extend(stacked(&[Section::Loads, Section::Hot], left, model));
    boxes.push((Section::Requests, right));
    boxes
}

/// The height that a section needs for all of its rows.
fn needed(section: Section, model: &Model, width: u16) -> u16 {
    let content = content(section, model, inner(width));
    u16::try_from(content.rows.len() + content.fixed_rows() + 2).unwrap_or(u16::MAX)
}

/// Boxes below each other. Each has the height that it needs, and those that need more share the rest.
fn stacked(sections: &[Section], area: Rect, model: &Model) -> Vec<(Section, Rect)> {
    let needs: Vec<_> = sections.iter().map(|section| needed(*section, model, area.width)).collect();
    let mut by_need: Vec<_> = (0..sections.len()).collect();
    by_need.sort_by_key(|at| needs[*at]);
    let (mut heights, mut rest) = (vec![0; sections.len()], area.height);
    for (at, sharers) in by_need.into_iter().zip((1..=sections.len() as u16).rev()) {
        heights[at] = needs[at].min(rest / sharers);
        rest -= heights[at];
    }
    if let Some(last) = heights.last_mut() {
        *last += rest;
    }
    let areas = Layout::vertical(heights.into_iter().map(Constraint::Length)).split(area);
    sections.iter().copied().zip(areas.iter().copied()).collect()
}

fn header(model: &Model) -> Line<'static> {
    let mut spans = vec![
        Span::styled("stampede-guard ", HEAD),
        Span::raw(format!("namespace {}", cut(&model.namespace, 40))),
    ];
    if model.age().is_some() {
        let processes = several(model.processes.len(), "process", "processes");
        spans.push(Span::raw(format!(", {processes}, asked in {}", duration(model.took_ms))));
    }
    if model.is_paused {
        spans.push(Span::styled("  PAUSED", WARN));
    }
    Line::from(spans)
}

/// The line below the header: what the operator must know of the data.
fn notice(model: &Model) -> Line<'static> {
    let age = model.age().map(|age| duration(Some(age.as_secs_f64() * 1e3)));
    let (text, style) = match (&model.error, age) {
        (Some(error), Some(age)) => {
            (format!("Not refreshed; the data is {age} old: {}", cut(error, 400)), BAD)
        }
        (Some(error), None) => (format!("No data yet: {}", cut(error, 400)), BAD),
        (None, None) => ("Asking the fleet ..".to_owned(), PLAIN),
        (None, Some(_)) if model.unreadable > 0.0 => {
            (format!("Unreadable answers, foreign or too long: {}", count(Some(model.unreadable))), WARN)
        }
        (None, Some(_)) => (String::new(), PLAIN),
    };
    Line::styled(text, style)
}

fn content(section: Section, model: &Model, width: usize) -> Content {
    match section {
        Section::Processes => processes(model, width),
        Section::Loads => loads(model, width),
        Section::Requests => requests(model, width),
        Section::Hot => hot_keys(model, width),
    }
}

/// One line of a table. The cells are cut to their columns, or filled up.
fn line(table: &[Column], cells: Vec<Cell>) -> Line<'static> {
    let mut spans = Vec::new();
    for (Column(_, width, is_number), (text, style)) in table.iter().zip(cells) {
        if !spans.is_empty() {
            spans.push(Span::raw(" "));
        }
        spans.push(Span::styled(padded(&text, *width, *is_number), style));
    }
    Line::from(spans)
}

fn head(table: &[Column]) -> Option<Line<'static>> {
    Some(line(table, table.iter().map(|column| (column.0.to_owned(), HEAD)).collect()))
}

/// What the first column has if the others have these widths, with a space between two.
fn rest(width: usize, others: &[Column]) -> usize {
    width.saturating_sub(others.iter().map(|column| column.1 + 1).sum()).max(8)
}

fn with_first(title: &'static str, width: usize, others: Vec<Column>) -> Vec<Column> {
    let first = Column(title, rest(width, &others), false);
    std::iter::once(first).chain(others).collect()
}

fn message(title: String, text: &str, width: usize) -> Content {
    let mut rows = vec![String::new()];
    for word in text.split(' ') {
        match rows.last_mut() {
            Some(row) if row.is_empty() => *row = word.to_owned(),
            Some(row) if columns(row) + 1 + columns(word) <= width => *row = format!("{row} {word}"),
            _ => rows.push(word.to_owned()),
        }
    }
    let rows = rows.into_iter().map(|row| Line::styled(row, QUIET)).collect();
    Content { title, head: None, rows, foot: None }
}

fn processes(model: &Model, width: usize) -> Content {
    let (silent, total) = (model.silent(), model.processes.len());
    let title = match silent {
        _ if total == 0 => "Processes".to_owned(),
        0 => format!("{}, all answered", several(total, "process", "processes")),
        _ => format!("{} of {} answered", total - silent, several(total, "process", "processes")),
    };
    if total == 0 {
        let text = match model.age() {
            Some(_) => {
                "No process answers. One that does has the feature `inspector`, has made an inspector (`guard.inspector()`), and has this server and this namespace."
            }
            None => "No answer yet.",
        };
        return message(title, text, width);
    }
    let is_wide = width >= COLUMNS_OF_DETAILS;
    let copies = if is_wide { 17 } else { 6 };
    // The other columns have a width of 36, and there are 8 spaces between all.
    let connection = if is_wide { width - NAME_OF_WIDE - copies - 36 - 8 } else { 10 };
    let table = with_first(
        "PROCESS",
        width,
        vec![
            Column("VERSION", 7, false),
            Column("UPTIME", 7, true),
            Column(if is_wide { "CONNECTION, BREAKER" } else { "CONNECTION" }, connection, false),
            Column("LAG", 6, true),
            Column("FLIGHTS", 7, true),
            Column("LOADS", 5, true),
            Column("COPIES", copies, true),
            Column("KEPT", 4, true),
        ],
    );
    let rows = model.processes.iter().map(|process| match &process.silent {
        Some(silent) => {
            let ago = duration(silent.last_answer_ms_ago);
            let text = format!("silent, last answer {ago} ago");
            let table = [Column("", table[0].1, false), Column("", columns(&text), false)];
            line(&table, vec![(process.name.clone(), WARN), (text, WARN)])
        }
        None => line(&table, process_cells(process, is_wide)),
    });
    Content {
        title,
        head: head(&table),
        rows: rows.collect(),
        foot: Some(line(&table, totals(model, is_wide))),
    }
}

fn process_cells(process: &Process, is_wide: bool) -> Vec<Cell> {
    let style = match process.trouble() {
        Trouble::Broken => BAD,
        Trouble::Unusual => WARN,
        Trouble::None => PLAIN,
    };
    let inbox = process.inbox.as_deref().filter(|inbox| *inbox != "up");
    let lag = inbox.map_or_else(|| duration(process.inbox_lag_ms), str::to_owned);
    vec![
        (process.name.clone(), style),
        (process.version.clone().unwrap_or_else(|| DASH.to_owned()), PLAIN),
        (duration(process.uptime_ms), PLAIN),
        (connection(process, is_wide), style),
        (lag, if inbox.is_some() { WARN } else { PLAIN }),
        (count(process.flights), PLAIN),
        (count(process.loads), PLAIN),
        (copies(process.copies, process.copied_bytes, is_wide), PLAIN),
        kept(process.kept_invalidations),
    ]
}

/// The state of the connection, and what is unusual about it.
fn connection(process: &Process, is_wide: bool) -> String {
    let commands = process.commands.as_deref().unwrap_or(DASH);
    let breaker = process.breaker.as_deref().unwrap_or(DASH);
    let mut text = match (is_wide, process.is_bypassed) {
        (false, true) => return "bypassed".to_owned(),
        (false, false) => return format!("{commands}/{breaker}"),
        (true, _) => format!("{commands}, {breaker}"),
    };
    if process.is_bypassed {
        text.push_str(", bypassed");
    }
    if let Some(reason) = &process.reason {
        text = format!("{text}: {reason}");
    }
    text
}

fn copies(copies: Option<f64>, size: Option<f64>, is_wide: bool) -> String {
    match (copies, size) {
        (Some(_), Some(_)) if is_wide => format!("{}, {}", count(copies), bytes(size)),
        _ => count(copies),
    }
}

fn kept(invalidations: Option<f64>) -> Cell {
    (count(invalidations), if invalidations.unwrap_or_default() > 0.0 { WARN } else { PLAIN })
}

fn totals(model: &Model, is_wide: bool) -> Vec<Cell> {
    let processes = &model.processes;
    let sum = |read: fn(&Process) -> Option<f64>| processes.iter().filter_map(read).reduce(|a, b| a + b);
    let lag = processes.iter().filter_map(|process| process.inbox_lag_ms).reduce(f64::max);
    let mut versions: Vec<_> = processes.iter().filter_map(|process| process.version.as_deref()).collect();
    versions.sort_unstable();
    versions.dedup();
    let version = match versions.len() {
        0 | 1 => (String::new(), HEAD),
        _ => (several(versions.len(), "kind", "kinds"), WARN),
    };
    let open = processes.iter().filter(|process| process.has_open_breaker()).count();
    let breakers = match open {
        0 => (String::new(), HEAD),
        _ if is_wide => (several(open, "breaker open", "breakers open"), BAD),
        _ => (format!("{open} open"), BAD),
    };
    let bold = |text: String| (text, HEAD);
    vec![
        bold("total".to_owned()),
        version,
        bold(String::new()),
        breakers,
        bold(lag.map_or_else(String::new, |lag| duration(Some(lag)))),
        bold(count(sum(|process| process.flights))),
        bold(count(sum(|process| process.loads))),
        bold(copies(sum(|process| process.copies), sum(|process| process.copied_bytes), is_wide)),
        bold(count(sum(|process| process.kept_invalidations))),
    ]
}

fn loads(model: &Model, width: usize) -> Content {
    let total = model.loads.len() as f64 + model.loads_left_out;
    let title = format!("Loads in progress: {}, the slowest first", count(Some(total)));
    if model.loads.is_empty() {
        return message("Loads in progress".to_owned(), "No process reports a load.", width);
    }
    let mut others = vec![Column("PROCESS", 16, false), Column("AGE", 7, true), Column("WAITERS", 7, true)];
    let is_wide = width >= 90;
    if is_wide {
        others.push(Column("", 17, false));
    }
    let table = with_first("KEY", width, others);
    let rows = model.loads.iter().map(|load| {
        let mut cells = vec![
            (load.key.clone(), PLAIN),
            (load.process.clone(), PLAIN),
            (duration(load.age_ms), PLAIN),
            (count(load.waiters), PLAIN),
        ];
        cells.extend(is_wide.then(|| (load.mode.clone().unwrap_or_default(), QUIET)));
        line(&table, cells)
    });
    Content { title, head: head(&table), rows: rows.collect(), foot: None }
}

fn hot_keys(model: &Model, width: usize) -> Content {
    let title = "Hottest keys of the last minute".to_owned();
    if model.hot.is_empty() {
        return message(title, "No process reports a hot key.", width);
    }
    let others = vec![Column("REQUESTS", 8, true), Column("ERROR", 6, true), Column("PROCESSES", 9, true)];
    let table = with_first("KEY", width, others);
    let answered = model.processes.len() - model.silent();
    let rows = model.hot.iter().map(|hot| {
        line(
            &table,
            vec![
                (hot.key.clone(), PLAIN),
                (count(Some(hot.requests)), PLAIN),
                (format!("±{}", count(Some(hot.error))), QUIET),
                (format!("{} of {answered}", hot.processes), PLAIN),
            ],
        )
    });
    Content { title, head: head(&table), rows: rows.collect(), foot: None }
}

/// A line for each policy, and below it one for each outcome that was counted.
fn requests(model: &Model, width: usize) -> Content {
    let title = "Requests per second".to_owned();
    let slots = model.rates.slots();
    if slots.is_empty() {
        let text = "Rates are differences of two answers: they appear with the next one.";
        return message(title, text, width);
    }
    let others = [Column("NOW", 6, true), Column("SHARE", 5, true)];
    // Half of the width for the names at most.
    let name = (rest(width, &others) / 2).clamp(8, 24);
    let bars = rest(width, &others).saturating_sub(name + 1).min(slots.len());
    let [now, share] = others;
    let table = [Column("POLICY", name, false), now, share, Column("", bars, false)];
    let shown: Vec<&Slot> = slots.iter().skip(slots.len() - bars).collect();
    let mut sums = std::collections::BTreeMap::<&str, f64>::new();
    for (policy, rates) in shown.iter().copied().flatten().flatten() {
        *sums.entry(policy).or_default() += rates.iter().sum::<f64>();
    }
    let mut policies: Vec<_> = sums.iter().map(|(policy, sum)| (*policy, *sum)).collect();
    policies.sort_by(|a, b| b.1.total_cmp(&a.1));
    policies.truncate(MOST_POLICIES);
    // By name, because in the order of their rates they would change places all the time.
    policies.sort_unstable_by_key(|(policy, _)| *policy);
    let mut rows = Vec::new();
    for (policy, _) in policies {
        let of_policy: Vec<Option<ByOutcome>> = shown
            .iter()
            .map(|slot| slot.as_ref().map(|rates| rates.get(policy).copied().unwrap_or_default()))
            .collect();
        rows.extend(policy_rows(&table, policy, &of_policy));
    }
    let time = duration(Some(bars as f64 * PERIOD.as_secs_f64() * 1e3)).replace(".0s", "s");
    Content { title: format!("{title}, the last {time}"), head: head(&table), rows, foot: None }
}

fn policy_rows(table: &[Column], policy: &str, slots: &[Option<ByOutcome>]) -> Vec<Line<'static>> {
    let totals: Vec<Option<f64>> = slots.iter().map(|slot| slot.map(|rates| rates.iter().sum())).collect();
    // All rows of a policy have one scale.
    let most = totals.iter().flatten().copied().fold(0.0, f64::max);
    let now = totals.last().copied().flatten();
    let per_second = |value: Option<f64>| value.map_or_else(|| DASH.to_owned(), rate);
    let name = if policy.is_empty() { "(without a name)" } else { policy };
    let bars = |values: &mut dyn Iterator<Item = Option<f64>>| values.map(|value| bar(value, most)).collect();
    let mut rows = vec![line(
        table,
        vec![
            (name.to_owned(), HEAD),
            (per_second(now), HEAD),
            (String::new(), HEAD),
            (bars(&mut totals.iter().copied()), PLAIN),
        ],
    )];
    for (at, (outcome, _)) in OUTCOMES.iter().enumerate() {
        let values = || slots.iter().map(|slot| slot.map(|rates| rates[at]));
        if values().flatten().all(|value| value == 0.0) {
            continue;
        }
        let latest = values().next_back().flatten();
        let share = latest.zip(now).filter(|(_, now)| *now > 0.0);
        let style = if *outcome == "failed" { BAD } else { PLAIN };
        rows.push(line(
            table,
            vec![
                (format!("  {outcome}"), style),
                (per_second(latest), style),
                (
                    share.map_or_else(String::new, |(latest, now)| format!("{:.0}%", 100.0 * latest / now)),
                    QUIET,
                ),
                (bars(&mut values()), style),
            ],
        ));
    }
    rows
}

/// A rate as one character. A time without a rate is empty, and any request is visible.
fn bar(value: Option<f64>, most: f64) -> char {
    match value {
        None => ' ',
        Some(value) if value <= 0.0 || most <= 0.0 => '·',
        Some(value) => {
            let level = (value / most * BARS.len() as f64).ceil() as usize;
            BARS[level.clamp(1, BARS.len()) - 1]
        }
    }
}
