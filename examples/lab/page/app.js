// Asks for the lab's state four times a second, and shows it.

import { act, build, show } from "/controls.js";
import { Area, Lanes, Stack, Times, number, perSecond, time } from "/charts.js";

const PERIOD = 250;
const KEPT = 244;
const $ = (id) => document.getElementById(id);

const OUTCOMES = [
  ["memory", "hit in memory"], ["hit", "hit in Redis"], ["stale", "stale"], ["waited", "waited"],
  ["loaded", "loaded"], ["alone", "loaded without Redis"], ["failed", "failed"],
];
const place = $("charts");
const charts = {
  loads: new Area(place, "loads", "Loads at the origin", "loads"),
  queue: new Area(place, "queue", "The origin's queue", "queue"),
  outcomes: new Stack(place, "outcomes", "Requests by outcome", OUTCOMES),
  times: new Times(place, "times", "Time of a request"),
  redis: new Area(place, "redis", "Commands that Redis gets", "redis"),
  leases: new Lanes(place, "leases", "Who loads, and who waits"),
};

let run = null, samples = [], lastEvent = 0, shownResults = -1;

async function poll() {
  let state;
  try {
    const response = await fetch(`/state?since=${samples.at(-1)?.seq ?? 0}`);
    state = await response.json();
  } catch {
    $("lost").hidden = false;
    setTimeout(poll, 1_000);
    return;
  }
  $("lost").hidden = true;
  if (state.run !== run) {
    // Another lab: its samples begin anew.
    const isFirst = run === null;
    [run, samples, lastEvent, shownResults] = [state.run, isFirst ? state.samples : [], 0, -1];
    if (!isFirst) return void setTimeout(poll, 0);
  } else samples.push(...state.samples);
  samples = samples.slice(-KEPT);
  show(state);
  facts(state);
  story(state);
  results(state);
  if (samples.length > 1) draw(state);
  setTimeout(poll, PERIOD);
}

function facts({ store, replicas, totals, origin }) {
  const up = replicas.filter((replica) => replica.state === "up").length;
  $("store-dot").className = `dot ${store.state === "up" ? "up" : "bad"}`;
  const condition = { up: "", hung: ", hangs", stopped: ", stopped" };
  const texts = {
    "store-text": store.text + condition[store.state],
    "fleet-text": `${up} of ${replicas.length} replicas up`,
    "total-requests": number(totals.requests),
    "total-loads": number(origin.loads),
  };
  for (const [id, text] of Object.entries(texts)) if ($(id).textContent !== text) $(id).textContent = text;
}

function clock(ms) {
  const seconds = Math.floor(ms / 1000);
  return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

function story({ events }) {
  const newest = events.at(-1);
  if (!newest || newest.id === lastEvent) return;
  lastEvent = newest.id;
  $("sentence").textContent = newest.text;
  $("log").replaceChildren(...events.toReversed().map(({ at_ms, text }) => {
    const item = document.createElement("li");
    const when = document.createElement("time");
    when.textContent = clock(at_ms);
    const what = document.createElement("span");
    what.textContent = text;
    item.append(when, what);
    return item;
  }));
}

function results({ results }) {
  const newest = results.at(-1)?.to_ms ?? 0;
  if (newest === shownResults) return;
  shownResults = newest;
  $("no-results").hidden = results.length > 0;
  $("results").hidden = results.length === 0;
  $("results").tBodies[0].replaceChildren(...results.toReversed().map((result) => {
    const row = document.createElement("tr");
    row.dataset.name = result.name;
    row.dataset.mode = result.mode;
    row.dataset.from = result.from_ms;
    row.dataset.to = result.to_ms;
    const cells = [
      ["title", result.title], ["mode", result.mode], ["requests", number(result.requests)],
      ["failed", number(result.failed), result.failed > 0 ? "bad" : "good"], ["loads", number(result.loads)],
      ["queue", number(result.queue)], ["p50", time(result.p50_ms)], ["p99", time(result.p99_ms)],
    ];
    for (const [name, text, kind] of cells) {
      const cell = document.createElement("td");
      cell.dataset.column = name;
      cell.textContent = text;
      if (kind) cell.className = kind;
      row.append(cell);
    }
    return row;
  }));
}

function draw({ controls, store }) {
  const isMemory = store.kind === "memory";
  charts.outcomes.name("hit", isMemory ? "hit in the shared memory" : "hit in Redis");
  charts.outcomes.name("memory", isMemory ? "hit in the replica's memory" : "hit in memory");
  const finishes = (controls.capacity * 1000) / Math.max(controls.latency_ms, 1);
  charts.loads.draw(samples, perSecond(samples, "loads"), {
    least: 10, bound: finishes, boundText: `it can finish ${number(finishes)} per second`, unit: "per second",
    isBad: (now) => now > finishes * 1.2,
  });
  charts.queue.draw(samples, samples.map((sample) => sample.queue), {
    least: 20, unit: "loads wait", isBad: (now) => now > 3 * controls.capacity,
  });
  charts.outcomes.draw(samples, "per second");
  charts.times.draw(samples);
  charts.redis.draw(samples, perSecond(samples, "commands"), {
    least: 100, unit: isMemory ? "as there is no Redis" : "per second", isBad: () => false,
    shade: { holds: (sample) => sample.store !== "up", text: "Redis down", kind: "down" },
  });
  charts.leases.draw(samples);
}

build();
poll();
// For scripts in the browser's console.
window.lab = { act };
