// The charts: SVG, drawn from the samples of the last minute. No library.

const SPAN = 60_000;
const PER_SECOND = 4; // samples
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 48, RIGHT = 8, TOP = 10, BOTTOM = 18;

export function number(value) {
  if (value == null) return "–";
  const digits = Math.abs(value) >= 10 || Number.isInteger(value) ? 0 : 1;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

export function time(ms) {
  if (ms == null) return "–";
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 9950 || ms === 1000 ? 0 : 1)} s`;
  return ms >= 10 || Number.isInteger(ms) ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/// The value of the samples in the second before each one.
export function perSecond(samples, name) {
  return samples.map((_, at) => {
    const from = Math.max(0, at - PER_SECOND + 1);
    let sum = 0;
    for (let i = from; i <= at; i++) sum += samples[i][name];
    return (sum * PER_SECOND) / (at - from + 1);
  });
}

/// The least of 1, 2, 3, 4, 6, 8, 10, 20 .. that is not below a value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value) ?? 10 * power;
}

/// A card with a title, the present value, a chart and a legend.
class Card {
  constructor(parent, id, title, legend = []) {
    this.title = title;
    this.card = document.createElement("article");
    this.card.className = "chart";
    this.card.id = `chart-${id}`;
    this.card.innerHTML = `<header><h2></h2><div class="now"></div></header><ul class="legend"></ul>`;
    this.card.querySelector("h2").textContent = title;
    this.now = this.card.querySelector(".now");
    this.svg = element("svg", { role: "img", "aria-label": title });
    this.card.insertBefore(this.svg, this.card.querySelector(".legend"));
    this.left = LEFT;
    this.right = RIGHT;
    this.values = new Map();
    for (const [name, text] of legend) {
      const item = document.createElement("li");
      item.innerHTML = `<i class="c-${name}"></i><span></span> <b></b>`;
      item.querySelector("span").textContent = text;
      this.card.querySelector(".legend").append(item);
      this.values.set(name, item);
    }
    this.described = 0;
    parent.append(this.card);
  }

  say(value, unit, isBad = false) {
    this.now.textContent = `${value} `;
    const small = document.createElement("small");
    small.textContent = unit;
    this.now.append(small);
    this.now.classList.toggle("bad", isBad);
  }

  name(name, text) {
    const label = this.values.get(name).querySelector("span");
    if (label.textContent !== text) label.textContent = text;
  }

  note(name, text, isNone) {
    const item = this.values.get(name);
    item.querySelector("b").textContent = text;
    item.classList.toggle("none", isNone);
  }

  /// Text for screen readers, renewed every few seconds.
  describe(text) {
    if (Date.now() - this.described > 3_000) {
      this.svg.setAttribute("aria-label", `${this.title}, the last minute: ${text}`);
      this.described = Date.now();
    }
  }

  /// Empties the drawing; sets its size and its axis of time.
  begin(samples) {
    const { width, height } = this.svg.getBoundingClientRect();
    this.width = Math.max(width, 120);
    this.height = Math.max(height, 60);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.end = samples.at(-1).at_ms;
    this.parts = [];
    this.labels = [];
    this.bottom = this.height - BOTTOM;
    const axis = this.bottom + 0.5;
    this.shade(samples, (sample) => sample.mode === "off", "guard off");
    for (const [at, text, anchor] of [[0, "60 s ago", "start"], [SPAN / 2, "30 s ago", "middle"], [SPAN, "now", "end"]]) {
      this.add("text", { x: this.x(this.end - SPAN + at), y: this.height - 4, "text-anchor": anchor }, text);
    }
    this.add("line", { class: "axis", x1: this.left, x2: this.width - this.right, y1: axis, y2: axis });
  }

  add(name, attributes, text) {
    this.parts.push(element(name, attributes, text));
  }

  finish() {
    this.svg.replaceChildren(...this.parts, ...this.labels);
  }

  x(at) {
    const x = this.width - this.right - ((this.end - at) / SPAN) * (this.width - this.left - this.right);
    return Math.max(this.left, Math.round(x * 10) / 10);
  }

  y(value) {
    const share = this.log
      ? Math.log(Math.max(value, this.least) / this.least) / Math.log(this.most / this.least)
      : value / this.most;
    return Math.round((this.bottom - Math.min(share, 1) * (this.bottom - TOP)) * 10) / 10;
  }

  /// Shades the times for which `holds`, and writes `text` in a row where there is room.
  shade(samples, holds, text, kind = "off", row = 0) {
    let from = null;
    const draw = (until) => {
      const x = this.x(from);
      const width = this.x(until) - x;
      if (width <= 0) return;
      this.add("rect", { class: kind, x, y: TOP - 8, width, height: this.bottom - TOP + 8 });
      if (width > (kind === "off" ? 58 : 24)) this.labels.push(element("text", { class: `${kind}-text`, x: x + 5, y: TOP + 4 + row * 15 }, text));
    };
    samples.forEach((sample) => {
      if (holds(sample)) from ??= sample.at_ms - 250;
      else if (from != null) {
        draw(sample.at_ms - 250);
        from = null;
      }
    });
    if (from != null) draw(this.end);
  }

  scale(most) {
    this.log = false;
    this.most = most;
    for (const share of [0, 0.5, 1]) this.tick(most * share, number(most * share));
  }

  logScale(least, most, ticks) {
    Object.assign(this, { log: true, least, most });
    for (const tick of ticks) this.tick(tick, time(tick));
  }

  tick(value, text) {
    const y = this.y(value);
    this.add("line", { class: "grid", x1: this.left, x2: this.width - RIGHT, y1: y + 0.5, y2: y + 0.5 });
    this.add("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, text);
  }

  line(samples, values, name, isFilled = false) {
    const points = [];
    let run = [];
    values.forEach((value, at) => {
      if (value == null || samples[at].at_ms < this.end - SPAN) {
        if (run.length) points.push(run);
        run = [];
      } else run.push([this.x(samples[at].at_ms), this.y(value)]);
    });
    if (run.length) points.push(run);
    for (const part of points) {
      const path = `M${part.map((point) => point.join(" ")).join("L")}`;
      if (isFilled) {
        this.add("path", { class: `area c-${name}`, d: `${path}L${part.at(-1)[0]} ${this.bottom}L${part[0][0]} ${this.bottom}Z` });
      }
      this.add("path", { class: `line c-${name}`, d: path });
    }
  }
}

/// One series, as a filled line, with an optional bound.
export class Area extends Card {
  constructor(parent, id, title, name) {
    super(parent, id, title);
    this.name = name;
    this.card.querySelector(".legend").remove();
  }

  draw(samples, values, { least, bound, boundText, unit, isBad, shade }) {
    this.begin(samples);
    if (shade) this.shade(samples, shade.holds, shade.text, shade.kind, 1);
    const highest = Math.max(...values, bound ?? 0, least);
    this.scale(roundUp(highest * 1.05));
    this.line(samples, values, this.name, true);
    if (bound != null) {
      const y = this.y(bound);
      this.add("line", { class: "bound", x1: this.left, x2: this.width - RIGHT, y1: y, y2: y });
      this.labels.push(element("text", { class: "bound-text", x: this.left + 5, y: y - 4 }, boundText));
    }
    this.finish();
    const now = values.at(-1);
    this.say(number(now), unit, isBad(now));
    this.describe(`now ${number(now)} ${unit}, at most ${number(Math.max(...values))}.`);
  }
}

/// Several series, one on top of the other.
export class Stack extends Card {
  constructor(parent, id, title, series) {
    super(parent, id, title, series);
    this.series = series;
  }

  draw(samples, unit) {
    this.begin(samples);
    const rates = this.series.map(([name]) => perSecond(samples, name));
    const sums = samples.map((_, at) => rates.reduce((sum, rate) => sum + rate[at], 0));
    this.scale(roundUp(Math.max(...sums, 10) * 1.02));
    const below = samples.map(() => 0);
    const shown = samples.map((sample) => sample.at_ms >= this.end - SPAN);
    this.series.forEach(([name], which) => {
      const rate = rates[which];
      if (rate.some((value) => value > 0)) {
        const up = [], down = [];
        samples.forEach((sample, at) => {
          if (!shown[at]) return;
          const x = this.x(sample.at_ms);
          up.push(`${x} ${this.y(below[at] + rate[at])}`);
          down.unshift(`${x} ${this.y(below[at])}`);
        });
        this.add("path", { class: `c-${name}`, d: `M${up.join("L")}L${down.join("L")}Z` });
      }
      rate.forEach((value, at) => (below[at] += value));
      this.note(name, number(rate.at(-1)), rate.at(-1) === 0);
    });
    this.finish();
    const now = this.series.map(([, text], which) => `${text} ${number(rates[which].at(-1))}`);
    this.say(number(sums.at(-1)), unit);
    this.describe(`now ${number(sums.at(-1))} ${unit}: ${now.join(", ")}.`);
  }
}

/// Times, on a logarithmic axis.
export class Times extends Card {
  constructor(parent, id, title) {
    super(parent, id, title, [["p50", "half within"], ["p99", "99 % within"]]);
    const note = document.createElement("li");
    note.textContent = "an error: 3 s";
    this.card.querySelector(".legend").append(note);
  }

  draw(samples) {
    this.begin(samples);
    this.logScale(1, 10_000, [1, 10, 100, 1_000]);
    for (const name of ["p50", "p99"]) {
      this.line(samples, samples.map((sample) => sample[name]), name);
      this.note(name, time(samples.at(-1)[name]), samples.at(-1)[name] == null);
    }
    this.finish();
    const { p50, p99 } = samples.at(-1);
    this.say(time(p99), "for 99 %", p99 > 1_500);
    const most = Math.max(0, ...samples.map((sample) => sample.p99 ?? 0));
    this.describe(`now half within ${time(p50)}, 99 % within ${time(p99)}; 99 % took ${time(most)} at worst.`);
  }
}

/// A lane for each of the hottest keys: which replica loads it, and how many requests wait.
export class Lanes extends Card {
  constructor(parent, id, title) {
    super(parent, id, title, [["one", "one load"], ["failed", "several loads"], ["waited", "requests wait"]]);
  }

  draw(samples) {
    // Beside the lanes stands what they are now.
    this.left = 66;
    this.right = 132;
    this.begin(samples);
    const keys = samples.at(-1).leases.length;
    const lane = (this.bottom - 2) / Math.max(keys, 4);
    const mostWaiting = Math.max(20, ...samples.flatMap((sample) => sample.leases.map(([, , waiting]) => waiting)));
    const texts = [];
    for (let key = 0; key < keys; key++) {
      const floor = Math.round((key + 1) * lane);
      this.add("line", { class: "grid", x1: this.left, x2: this.width - this.right, y1: floor + 0.5, y2: floor + 0.5 });
      const paths = new Map();
      const put = (kind, from, until, height) => {
        const x = this.x(from);
        const width = Math.round((this.x(until) - x) * 10) / 10;
        if (width > 0) paths.set(kind, `${paths.get(kind) ?? ""}M${x} ${floor}v${-height}h${width}v${height}z`);
      };
      for (const sample of samples) {
        const [loads, replica, waiting] = sample.leases[key] ?? [0, 0, 0];
        const from = sample.at_ms - 250;
        if (waiting > 1) put("wait", from, sample.at_ms, Math.max(2, Math.round((waiting / mostWaiting) * (lane - 4))));
        if (loads > 1) put("many", from, sample.at_ms, Math.min(lane - 3, 4 + 2 * Math.log2(loads)));
        else if (loads === 1) put(`r${replica}`, from, sample.at_ms, 6);
      }
      for (const [kind, d] of paths) this.add("path", { class: kind, d });
      const [loads, replica, waiting] = samples.at(-1).leases[key];
      const who = loads > 1 ? `${loads} loads` : loads === 1 ? `replica ${replica} loads` : "";
      const text = [who, waiting > 1 ? `${waiting} wait` : ""].filter(Boolean).join(", ");
      this.add("text", { class: "lane", x: this.left - 6, y: floor - 4, "text-anchor": "end" }, `report:${key + 1}`);
      if (text) this.add("text", { class: "lane-now", x: this.width - this.right + 8, y: floor - 4 }, text);
      if (text) texts.push(`report:${key + 1}, ${text}`);
    }
    this.finish();
    const most = Math.max(...samples.at(-1).leases.map(([loads]) => loads));
    const waiting = samples.at(-1).leases.reduce((sum, lease) => sum + lease[2], 0);
    this.say(number(waiting), waiting === 1 ? "waits" : "wait", most > 1);
    this.describe(`now ${texts.join("; ") || "no load runs"}.`);
  }
}
