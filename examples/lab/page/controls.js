// The controls: real inputs and buttons, kept in step with the lab's state.

const FIELDS = {
  requests_per_second: { text: "Requests", unit: "per second", most: 2000, step: 50 },
  keys: { text: "Hot keys", unit: "reports", most: 100, step: 1 },
  replicas: { text: "Replicas", unit: "processes", most: 12, step: 1 },
  latency_ms: { text: "Latency", unit: "ms per load", most: 2000, step: 50 },
  capacity: { text: "Capacity", unit: "loads at once", most: 64, step: 1 },
  slowdown_percent: { text: "Slowed by the queue", unit: "% per queued load", most: 20, step: 1 },
  failure_percent: { text: "Failures", unit: "% of loads", most: 100, step: 5 },
  fresh_ms: { text: "Values are fresh for", unit: "ms", most: 20000, step: 500 },
};
const MODES = {
  off: "A plain cache in the same Redis: each request that misses loads.",
  on: "One request of the fleet loads; the others wait.",
  stale: "Stale values are served while one request loads, and when its load fails.",
  local: "Hits come from each replica's memory; invalidations reach it.",
  adaptive: "As on, and the fleet runs only as many loads at once as the origin can take.",
};

const $ = (id) => document.getElementById(id);

/// Sends JSON; returns the answer, or throws the sentence that says what to do.
export async function send(path, body) {
  let response;
  try {
    response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("The lab does not answer.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

let refusalEnds;
/// Shows why something was not done, for some seconds.
function refuse(error) {
  const text = error.message;
  $("refusal").textContent = text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
  $("refusal").hidden = false;
  clearTimeout(refusalEnds);
  refusalEnds = setTimeout(() => ($("refusal").hidden = true), 8_000);
}

export function act(path, body) {
  $("refusal").hidden = true;
  return send(path, body).catch(refuse);
}

class Field {
  constructor(parent, name) {
    const { text, unit, most, step } = FIELDS[name];
    this.name = name;
    this.sent = 0;
    this.root = document.createElement("div");
    this.root.className = "field";
    this.root.innerHTML = `<label for="${name}"></label><input type="range" id="${name}-range" step="${step}" max="${most}">
      <input type="number" id="${name}" aria-describedby="${name}-error"><span class="error" id="${name}-error" role="alert" hidden></span>`;
    const label = this.root.querySelector("label");
    label.textContent = `${text} `;
    const small = document.createElement("small");
    small.textContent = unit;
    label.append(small);
    [this.range, this.input] = this.root.querySelectorAll("input");
    this.error = this.root.querySelector(".error");
    this.range.setAttribute("aria-label", `${text}, ${unit}`);
    this.range.addEventListener("input", () => {
      // The slider of a number that begins at one still moves in whole steps.
      this.input.value = Math.max(this.range.value, this.input.min || 0);
      this.later();
    });
    this.input.addEventListener("input", () => this.later());
    this.input.addEventListener("change", () => this.later(0));
    parent.append(this.root);
  }

  later(wait = 300) {
    this.isChanging = true;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.submit(), wait);
  }

  async submit() {
    const order = ++this.sent;
    const typed = this.input.value.trim();
    const value = typed === "" || Number.isNaN(Number(typed)) ? typed : Number(typed);
    try {
      await send("/control", { [this.name]: value });
      this.fault("");
    } catch (error) {
      if (order === this.sent) this.fault(error.message);
    }
    if (order === this.sent) this.isChanging = false;
  }

  fault(text) {
    this.error.textContent = text;
    this.error.hidden = !text;
    this.input.setAttribute("aria-invalid", Boolean(text));
  }

  show(value, [least, most]) {
    this.input.min = this.range.min = least;
    this.input.max = most;
    if (this.isChanging || !this.error.hidden) return;
    if (document.activeElement !== this.input) this.input.value = value;
    if (document.activeElement !== this.range) this.range.value = value;
  }
}

const fields = [];
const rows = new Map();

export function build() {
  for (const place of document.querySelectorAll("[data-fields]")) {
    for (const name of place.dataset.fields.split(" ")) fields.push(new Field(place, name));
  }
  for (const radio of document.querySelectorAll("[name=mode]")) {
    radio.addEventListener("change", () => act("/control", { mode: radio.value }));
  }
  document.addEventListener("click", (event) => {
    const { fault, replica } = event.target.dataset ?? {};
    if (fault) act("/fault", { what: fault, replica: replica === "leader" ? replica : Number(replica) });
  });
  for (const id of ["redis-stop", "redis-hang", "redis-restart"]) {
    $(id).addEventListener("click", () => act("/redis", { what: $(id).dataset.what }));
  }
  $("invalidate").addEventListener("submit", (event) => {
    event.preventDefault();
    act("/invalidate", { key: `report:${$("key").value}` });
  });
  $("invalidate-all").addEventListener("click", () => act("/invalidate", { key: "*" }));
  for (const preset of document.querySelectorAll(".preset")) {
    preset.addEventListener("click", () => {
      if (preset.getAttribute("aria-pressed") === "true") act("/preset/stop", {});
      else act("/preset", { name: preset.dataset.preset, compare: $("compare").checked });
    });
  }
}

/// A row of a replica: made once, so that the keyboard's focus stays.
function row(id) {
  const made = document.createElement("tr");
  made.innerHTML = `<th scope="row"><i class="r${id}"></i>${id}</th><td class="state"></td>${'<td><button type="button"></button></td>'.repeat(3)}`;
  for (const button of made.querySelectorAll("button")) button.dataset.replica = id;
  $("fleet").append(made);
  return made;
}

function showReplica({ id, state, loads, waiting, breaker, asked }, isFixed) {
  if (!rows.has(id)) rows.set(id, row(id));
  const shown = rows.get(id);
  const work = [loads ? `${loads} load${loads > 1 ? "s" : ""}` : "", waiting > 1 ? `${waiting} wait` : ""].filter(Boolean).join(", ");
  const names = { up: "up", starting: "starting", dead: "dead", paused: "paused", cut: "cut off", slow: "slow Redis" };
  const aside = state === "paused" && !asked ? "paused, not asked" : names[state];
  const without = state === "up" && breaker === "open" ? "no Redis" : aside;
  const text = state === "up" && without === "up" && work ? work : [without, work].filter(Boolean).join(", ");
  const cell = shown.querySelector(".state");
  if (cell.textContent !== text) cell.textContent = text;
  const isDead = state === "dead";
  const isCut = state === "cut" || state === "slow";
  const offered = [
    isDead ? ["start", "Start"] : ["kill", "Kill"],
    state === "paused" ? ["resume", "Resume"] : ["pause", "Pause", isDead || state === "starting"],
    isCut ? ["heal", "Heal"] : ["cut", "Cut off", isDead],
  ];
  shown.querySelectorAll("button").forEach((button, at) => {
    const [fault, name, isOff] = offered[at];
    button.dataset.fault = fault;
    button.textContent = name;
    button.disabled = Boolean(isOff) || isFixed;
    button.setAttribute("aria-label", `${name} replica ${id}`);
  });
}

function showPreset(preset, isMemory) {
  for (const card of document.querySelectorAll(".preset")) {
    const isThis = preset?.name === card.dataset.preset;
    const needsRedis = ["dying-leader", "redis-down"].includes(card.dataset.preset);
    card.setAttribute("aria-pressed", isThis);
    card.disabled = Boolean(preset && !isThis) || (isMemory && needsRedis);
    const text = card.querySelector("span");
    card.dataset.text ??= text.textContent;
    const wanted = isThis ? "Running. Press again to stop it." : card.dataset.text;
    if (text.textContent !== wanted) text.textContent = wanted;
  }
  $("compare").disabled = Boolean(preset);
  $("progress").hidden = !preset;
  if (!preset) return;
  const phase = preset.phases > 1 ? `${preset.phase} of ${preset.phases}, ` : "";
  const left = preset.left_ms == null ? "waiting for quiet" : `${Math.ceil(preset.left_ms / 1000)} s left`;
  $("progress-text").textContent = `${phase}guard ${preset.mode}: ${left}`;
  const done = preset.left_ms == null ? 0 : Math.max(0, 1 - preset.left_ms / preset.length_ms);
  $("progress-bar").value = (preset.phase - 1 + done) / preset.phases;
}

/// Shows the state of the lab in the controls.
export function show(state) {
  const { controls, limits, replicas, store, preset } = state;
  const isMemory = store.kind === "memory";
  for (const field of fields) field.show(controls[field.name], limits[field.name]);
  for (const radio of document.querySelectorAll("[name=mode]")) radio.checked = radio.value === controls.mode;
  $("mode-help").textContent = MODES[controls.mode];
  for (const name of ["guard", "load", "origin", "keys"]) $(`group-${name}`).disabled = Boolean(preset);
  for (const name of ["replicas", "redis"]) $(`group-${name}`).disabled = Boolean(preset) || isMemory;
  $("no-processes").hidden = !isMemory;
  $("leader-row").hidden = isMemory;
  $("key").max = controls.keys;
  for (const replica of replicas) showReplica(replica, isMemory);
  for (const [id, shown] of rows) {
    if (!replicas.some((replica) => replica.id === id)) {
      shown.remove();
      rows.delete(id);
    }
  }
  const condition = { up: "Redis answers.", hung: "Redis hangs: it takes commands and does not answer.", stopped: "Redis is stopped." };
  $("redis-help").textContent = isMemory ? "There is no Redis." : condition[store.state];
  const button = (id, what, text, isOff = false) => {
    $(id).dataset.what = what;
    $(id).textContent = text;
    $(id).disabled = isOff;
  };
  if (store.state === "stopped") button("redis-stop", "start", "Start");
  else button("redis-stop", "stop", "Stop");
  if (store.state === "hung") button("redis-hang", "resume", "Resume");
  else button("redis-hang", "hang", "Hang", store.state === "stopped");
  button("redis-restart", "restart", "Restart", store.state !== "up");
  showPreset(preset, isMemory);
}
