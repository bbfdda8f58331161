// Shared by all views: elements, the key, requests, server-sent events, frames, the tooltip, announcements.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

// The key lives as long as the tab.
export const key = {
  get: () => sessionStorage.getItem("key") || "",
  set: (value) => sessionStorage.setItem("key", value),
};

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { body, method, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    let message = `${answer.status} ${answer.statusText}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      // another program answered: its status has to do
    }
    if (answer.status === 401) $("key-form").hidden = false;
    throw new HttpError(answer.status, message);
  }
  return answer;
}

// Server-sent events of a fetched answer, those of one read together: EventSource cannot send a key.
export async function* batches(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    const found = [];
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") found.push(JSON.parse(part.slice(6)));
    }
    if (found.length) yield found;
  }
}

// Work that is done once before the next frame, however often it is asked for; `name` tells equal work apart. Drawing
// gets a twentieth of the time, in frames 40 to 200 ms apart: an engine on the same machine needs the rest.
const LEAST_MS = 40;
const MOST_MS = 200;
const SHARE = 20;
const pending = new Map();
let drawn = 0;
let gap = LEAST_MS;
export function onFrame(name, work) {
  if (!pending.size) {
    const early = drawn + gap - performance.now();
    if (early > 0) setTimeout(() => requestAnimationFrame(flushFrame), early);
    else requestAnimationFrame(flushFrame);
  }
  pending.set(name, work);
}

function flushFrame() {
  const work = [...pending.values()];
  pending.clear();
  drawn = performance.now();
  for (const each of work) each();
  afterFrame.port2.postMessage(null); // arrives when layout and paint are done
}

const afterFrame = new MessageChannel();
afterFrame.port1.onmessage = () => {
  gap = Math.min(Math.max(SHARE * (performance.now() - drawn), LEAST_MS), MOST_MS);
};

export function showTip(text, x, y) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 16 + height > innerHeight ? Math.max(4, y - height - 8) : y + 16}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}

// Tell screen readers; the region is emptied first so that equal texts are read again.
export function announce(text) {
  $("announce").textContent = "";
  setTimeout(() => {
    $("announce").textContent = text;
  }, 50);
}

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Colours that stay apart: steps of the golden angle around the circle.
export const slotColour = (slot) => `hsl(${(200 + slot * 137.5) % 360} 55% ${slot % 2 ? 46 : 54}%)`;

// A canvas at the screen's own resolution, cleared.
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
