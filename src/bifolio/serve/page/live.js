// The live view: a map of the cache's blocks, the batch's slots, and a minute of history.
import { $, batches, cssColour, hideTip, make, onFrame, prepare, request, showTip, slotColour } from "./core.js";

const HELD = 2; // states: 0 free, 1 cached, HELD + slot
const SECONDS = 60;
const INTERVAL = 0.25;
const FRESH = 3; // seconds after which a figure without news vanishes
const history = [];
let controller = null;
let grid = null; // of the last drawing: {columns, size, blocks}

export async function startLive() {
  if (controller) return;
  controller = new AbortController();
  const mine = controller;
  while (controller === mine) {
    try {
      const answer = await request(`/live?interval=${INTERVAL}`, { signal: mine.signal });
      for await (const found of batches(answer)) {
        for (const event of found) note(event);
        const newest = found.at(-1);
        onFrame("live", () => draw(newest));
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) {
        stopLive();
        return;
      }
    }
    clearLive(); // the stream ended: its figures are old
    await new Promise((done) => setTimeout(done, 1000));
  }
}

export function stopLive() {
  controller?.abort();
  controller = null;
  hideTip();
}

function draw(event) {
  if ($("live").hidden) return;
  if (event.blocks !== undefined) {
    const bytes = Uint8Array.from(atob(event.blocks), (letter) => letter.charCodeAt(0));
    drawBlocks(bytes, event);
    drawSlots(event);
  } else {
    clearPicture("The engine is starting: no figures yet.");
  }
  drawCharts();
}

// Without a server there are no figures: old ones would be taken for new ones.
export function clearLive() {
  history.length = 0;
  clearPicture("No figures: the server does not answer.");
  if (!$("live").hidden) drawCharts();
}

function clearPicture(sentence) {
  grid = null;
  hideTip();
  prepare($("blocks"), 0);
  delete $("blocks").dataset.held;
  delete $("blocks").dataset.cached;
  $("slots").replaceChildren();
  $("blocks-summary").textContent = sentence;
  $("slots-summary").textContent = $("waiting").textContent = "";
  $("sessions-card").hidden = true;
}

// The same figures in other colours, or at another width.
export function redrawLive() {
  if ($("live").hidden || !grid) return;
  drawBlocks(grid.bytes, grid.event);
  drawCharts();
}
addEventListener("resize", () => onFrame("resize", redrawLive));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawLive);

// -- blocks ----------------------------------------------------------------------------------------------------------

// The largest cells with which all blocks fit into a band of reasonable height.
function layout(count, width) {
  const tallest = Math.max(160, Math.min(420, innerHeight * 0.45));
  for (let size = 18; size > 3; size -= 1) {
    const columns = Math.max(1, Math.floor(width / size));
    if (Math.ceil(count / columns) * size <= tallest) return { columns, size };
  }
  return { columns: Math.max(1, Math.floor(width / 3)), size: 3 };
}

function drawBlocks(bytes, event) {
  const count = bytes.length / 2;
  const canvas = $("blocks");
  const { columns, size } = layout(count, canvas.clientWidth);
  const [context] = prepare(canvas, Math.ceil(count / columns) * size);
  const gap = size > 6 ? 1.5 : size > 4 ? 1 : 0.5;
  const free = cssColour("--free");
  const cached = cssColour("--cached");
  const ink = cssColour("--ink");
  const counts = { free: 0, cached: 0, held: 0, shared: 0 };
  for (let block = 0; block < count; block += 1) {
    const [state, holders] = [bytes[2 * block], bytes[2 * block + 1]];
    const x = (block % columns) * size;
    const y = Math.floor(block / columns) * size;
    context.fillStyle = state === 0 ? free : state === 1 ? cached : slotColour(state - HELD);
    context.fillRect(x, y, size - gap, size - gap);
    counts[state === 0 ? "free" : state === 1 ? "cached" : "held"] += 1;
    if (holders > 1) {
      counts.shared += 1;
      drawShare(context, x, y, size, gap, holders, ink);
    }
  }
  grid = { columns, size, bytes, event };
  const parts = [`${counts.held} held`, `${counts.shared} shared`, `${counts.cached} cached`, `${counts.free} free`];
  const { total_references: wanted, total_blocks_referenced: held } = event.stats;
  if (wanted > held) parts.push(`sharing saves ${wanted - held}`);
  const { num_states: states, num_held_states: live, num_checkpoints: checkpoints } = event.stats;
  if (states) parts.push(`${live} of ${states} recurrent states in use, ${checkpoints} checkpoints`);
  $("blocks-summary").textContent = `${count} blocks of ${event.block_size} tokens: ${parts.join(" · ")}`;
  canvas.dataset.held = counts.held;
  canvas.dataset.cached = counts.cached;
}

function drawShare(context, x, y, size, gap, holders, ink) {
  if (size >= 12) {
    context.fillStyle = "#fff";
    context.font = `bold ${size - 5}px system-ui`;
    context.textAlign = "center";
    context.fillText(holders > 9 ? "+" : holders, x + (size - gap) / 2, y + size - 4.5);
  } else {
    context.strokeStyle = ink;
    context.lineWidth = size > 6 ? 1.5 : 1;
    context.strokeRect(x + 0.75, y + 0.75, size - gap - 1.5, size - gap - 1.5);
  }
}

function blockTip(event) {
  if (!grid) return;
  const { left, top } = $("blocks").getBoundingClientRect();
  const column = Math.floor((event.clientX - left) / grid.size);
  const block = Math.floor((event.clientY - top) / grid.size) * grid.columns + column;
  const [state, holders] = [grid.bytes[2 * block], grid.bytes[2 * block + 1]];
  if (state === undefined || column >= grid.columns) return hideTip();
  const slot = grid.event.slots.find((each) => each.slot === state - HELD);
  const what = state === 0 ? "free" : state === 1 ? "cached prefix, free to be evicted"
    : `held by slot ${state - HELD}${slot ? `, request ${slot.id}` : ""}`;
  showTip(`block ${block + 1}: ${what}${holders > 1 ? `\nshared by ${holders} sequences` : ""}`,
          event.clientX, event.clientY);
}
$("blocks").addEventListener("pointermove", blockTip);
$("blocks").addEventListener("pointerleave", hideTip);

// -- slots -----------------------------------------------------------------------------------------------------------

function drawSlots(event) {
  const rows = event.slots.map((slot) => {
    const total = slot.prompt + slot.limit;
    const done = Math.min(slot.computed, slot.prompt);
    const chip = make("span", { className: "chip" });
    chip.style.background = slotColour(slot.slot);
    const bar = make("div", { className: "bar" }, make("div", { className: "done" }), make("div", { className: "made" }));
    bar.children[0].style.width = `${(100 * done) / total}%`;
    bar.children[1].style.width = `${(100 * slot.generated) / total}%`;
    const text = slot.phase === "prefill" ? `prompt ${done} / ${slot.prompt}` : `token ${slot.generated} / ${slot.limit}`;
    const row = make("div", { className: "slot" }, chip, make("span", { textContent: slot.phase }), bar,
                     make("span", { className: "count", textContent: text }));
    const notes = [`request ${slot.id}`, `${slot.cached} prompt tokens were cached`];
    if (slot.beams) notes.push(`one of ${slot.beams} beams`);
    if (slot.drafted) notes.push(`${slot.accepted} of ${slot.drafted} draft tokens accepted`);
    if (slot.preemptions) notes.push(`preempted ${slot.preemptions} times`);
    row.title = notes.join("\n");
    return row;
  });
  $("slots").replaceChildren(...rows);
  $("slots-summary").textContent = `${event.slots.length} of ${event.max_num_seqs} in use`;
  const waiting = event.waiting.length;
  drawSessions(event);
  $("waiting").textContent = waiting ? `${waiting >= 100 ? "100 or more" : waiting} waiting` : "no requests waiting";
}

// The conversations that this client named in its requests: warm, on disk, or gone.
function drawSessions(event) {
  const sessions = event.sessions ?? [];
  $("sessions-card").hidden = !sessions.length;
  const names = { warm: "warm", disk: "on disk", gone: "gone" };
  const rows = sessions.map((session) => {
    const left = session.pin ? "pinned" : session.ttl > 0 ? `${Math.ceil(session.ttl)} s` : "–";
    const cells = [session.session_id, names[session.state], session.tokens, session.cached, left];
    return make("tr", { className: session.state }, ...cells.map((cell) => make("td", { textContent: cell })));
  });
  $("sessions").replaceChildren(...rows);
  const warm = sessions.filter((session) => session.state === "warm").length;
  $("sessions-summary").textContent = `${warm} of ${sessions.length} warm`;
}

// -- charts ----------------------------------------------------------------------------------------------------------

const CHARTS = [
  ["prefill", "--accent", (rate) => rate.prefill, (value) => value.toFixed(0)],
  ["decode", "--accent", (rate) => rate.decode, (value) => value.toFixed(0)],
  ["ttft", "--accent", (rate) => rate.ttft, (value) => `${(1000 * value).toFixed(0)} ms`],
  ["hits", "--accent", (rate) => rate.hits, (value) => `${(100 * value).toFixed(0)} %`],
  ["drafts", "--accent", (rate) => rate.drafts, (value) => `${(100 * value).toFixed(0)} %`],
];

// Rates over the last second; a restart of the engine begins anew.
function note(event) {
  const sample = { time: event.time, ...event.stats, ...event.latency };
  const old = history.findLast((each) => each.time <= event.time - 1) ?? history[0];
  const rate = { time: event.time, prefill: 0, decode: 0, ttft: null, hits: null, drafts: null };
  if (old && old.num_steps <= sample.num_steps && event.time > old.time) {
    const seconds = event.time - old.time;
    rate.prefill = (sample.num_prefill_tokens - old.num_prefill_tokens) / seconds;
    rate.decode = (sample.num_decode_tokens - old.num_decode_tokens) / seconds;
    const first = sample.ttft_count - old.ttft_count;
    if (first > 0) rate.ttft = (sample.ttft_sum - old.ttft_sum) / first;
    const looked = sample.num_prompt_tokens - old.num_prompt_tokens;
    if (looked > 0) rate.hits = (sample.num_cached_tokens - old.num_cached_tokens) / looked;
    const guessed = sample.num_draft_tokens - old.num_draft_tokens;
    if (guessed > 0) rate.drafts = (sample.num_accepted_tokens - old.num_accepted_tokens) / guessed;
  }
  history.push({ ...sample, rate });
  while (history.length && history[0].time < event.time - SECONDS - 2) history.shift();
}

function drawCharts() {
  const now = history.at(-1)?.time ?? 0;
  $("drafts-chart").hidden = history.at(-1)?.num_draft_tokens === undefined;
  for (const [name, colour, read, show] of CHARTS) {
    const points = history.map((each) => [each.time, read(each.rate)]).filter(([, value]) => value !== null);
    const last = points.at(-1);
    $(`now-${name}`).textContent = last && now - last[0] <= FRESH ? show(last[1]) : "–";
    drawChart($(`chart-${name}`), points, now, cssColour(colour), show);
  }
}

function drawChart(canvas, points, now, colour, show) {
  const height = 56;
  const [context, width] = prepare(canvas, height);
  const top = Math.max(...points.map(([, value]) => value), 1e-9) * 1.1;
  context.strokeStyle = cssColour("--line");
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  if (!points.length) return;
  context.fillStyle = cssColour("--muted");
  context.font = "11px system-ui";
  context.textAlign = "left";
  context.fillText(show(top / 1.1), 2, 11);
  context.strokeStyle = colour;
  context.lineWidth = 1.8;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach(([time, value], index) => {
    const x = width * (1 - (now - time) / SECONDS);
    const y = (height - 2) * (1 - value / top) + 1;
    if (index) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
}
