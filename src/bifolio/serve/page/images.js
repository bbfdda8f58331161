// Images of messages: pasted, dropped or picked, checked, and kept in the browser's database; a message holds their ids.
//
//   attached      ids of the images that go with the next message
//   held          id → {blob, url, data}: of the images that this page has read, as a picture and as a request holds it
import { $, announce, make, plural } from "./core.js";
import { state } from "./state.js";
import { all, newId } from "./store.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 32 * 2 ** 20; // of an image, on the server
const ROOM = 64 * 2 ** 10; // for the rest of a request
const held = new Map();
let attached = [];
let problem = () => {};

export const mayAttach = () => Boolean(state.card?.reads_images) && state.conversation?.mode === "chat";

export function setUpImages(tell) {
  problem = tell;
  $("attach").onclick = () => $("image-file").click();
  $("image-file").onchange = () => {
    attach($("image-file").files);
    $("image-file").value = "";
  };
  $("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  const isFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  $("talk").addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault(); // a dropped file must never replace the page
    event.dataTransfer.dropEffect = mayAttach() ? "copy" : "none";
    $("composer").classList.toggle("dropping", mayAttach());
  });
  $("talk").addEventListener("dragleave", () => $("composer").classList.remove("dropping"));
  $("talk").addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    $("composer").classList.remove("dropping");
    attach(event.dataTransfer.files);
  });
  sweep();
}

// Show the button where the chosen model reads images, with the limits in its title.
export function showAttach() {
  $("attach").hidden = !mayAttach();
  $("attach").title = `PNG, JPEG, WebP or GIF; all images of a chat take at most ${megabytes(most())} together`;
  if (!mayAttach()) clear();
}

const most = () => Math.min(MOST_BYTES, Math.floor(((state.card?.max_body_bytes ?? MOST_BYTES) - ROOM) * 0.75)); // base64
const megabytes = (count) => `${(count / 1e6).toFixed(1)} MB`;

async function attach(files) {
  if (!mayAttach()) {
    problem(state.conversation.mode === "chat" ? "This model reads text only." : "Images go with chats, not with completions.");
    return;
  }
  for (const file of files) {
    if (!TYPES.includes(file.type)) problem(`${file.name || "The file"} is no PNG, JPEG, WebP or GIF.`);
    else if (file.size > most()) {
      problem(`${file.name || "The image"} has ${megabytes(file.size)} and the server takes ${megabytes(most())}: make it smaller, or start the server with a larger --max-body.`);
    } else attached.push(await add(file));
  }
  draw();
  $("prompt").focus();
}

async function add(blob) {
  const id = newId();
  await hold(id, blob);
  await stored("readwrite", (images) => images.put(blob, id));
  return id;
}

async function hold(id, blob) {
  const data = await new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
  held.set(id, { blob, url: URL.createObjectURL(blob), data });
}

export function takeAttached() {
  const taken = attached;
  attached = [];
  draw();
  return taken;
}

export function giveBack(ids) {
  attached = [...ids];
  draw();
}

const clear = () => attached.length && giveBack([]);

function draw() {
  const parts = attached.map((id, index) => {
    const remove = make("button", { type: "button", className: "quiet small", textContent: "Remove", "aria-label": `Remove image ${index + 1}` });
    remove.onclick = () => {
      attached = attached.filter((other) => other !== id);
      draw();
      $("prompt").focus();
    };
    return make("span", { className: "attachment" }, thumbnail(id, index), remove);
  });
  $("attachments").replaceChildren(...parts);
  $("attachments").hidden = !parts.length;
  if (parts.length) announce(`${plural(parts.length, "image")} attached.`);
}

function thumbnail(id, index) {
  const { url, blob } = held.get(id) ?? {};
  if (!url) return make("span", { className: "muted small", textContent: "image no longer in this browser" });
  return make("img", { className: "thumbnail", src: url, alt: `Image ${index + 1}`, title: `${blob.type.slice(6).toUpperCase()}, ${megabytes(blob.size)}` });
}

// The ids of images that this page can send again.
export const known = (ids) => ids?.filter((id) => held.has(id));

export const thumbnails = (ids) => make("div", { className: "thumbnails" }, ...ids.map(thumbnail));

// The content of a message as a request has it; an error where an image is gone or all are too large together.
export function contentOf(node) {
  if (!node.images?.length) return node.text;
  const urls = node.images.map((id) => held.get(id)?.data);
  if (urls.includes(undefined)) throw new Error("An image of this chat is no longer in this browser: edit its message, which drops it.");
  return [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: node.text }];
}

export function checkSize(messages) {
  const size = messages.reduce((sum, { content }) =>
    sum + (Array.isArray(content) ? content.reduce((total, part) => total + (part.image_url?.url.length ?? 0), 0) : 0), 0);
  const limit = (state.card?.max_body_bytes ?? Infinity) - ROOM;
  if (size > limit) {
    throw new Error(`The images of this chat have ${megabytes(0.75 * size)} and the server takes ${megabytes(0.75 * limit)}: start a new chat, or the server with a larger --max-body.`);
  }
}

// Read the images of a conversation, then draw.
export async function load(conversation, done) {
  const missing = conversation.nodes.flatMap((node) => node.images ?? []).filter((id) => !held.has(id));
  for (const id of missing) {
    const blob = await stored("readonly", (images) => images.get(id));
    if (blob) await hold(id, blob);
  }
  if (missing.length) done();
}

// -- the database ------------------------------------------------------------------------------------------------------

let database = null;

function opened() {
  database ??= new Promise((done, fail) => {
    const wanted = indexedDB.open("bifolio", 1);
    wanted.onupgradeneeded = () => wanted.result.createObjectStore("images");
    wanted.onsuccess = () => done(wanted.result);
    wanted.onerror = () => fail(wanted.error);
  });
  return database;
}

// The result of one request; undefined where the browser forbids its database: images last as long as the page.
async function stored(mode, ask) {
  try {
    const wanted = ask((await opened()).transaction("images", mode).objectStore("images"));
    return await new Promise((done, fail) => {
      wanted.onsuccess = () => done(wanted.result);
      wanted.onerror = () => fail(wanted.error);
    });
  } catch {
    return undefined;
  }
}

// Remove the images of deleted chats.
async function sweep() {
  const used = new Set(all().flatMap(({ nodes }) => nodes.flatMap((node) => node.images ?? [])));
  for (const id of (await stored("readonly", (images) => images.getAllKeys())) ?? []) {
    if (!used.has(id) && !held.has(id)) await stored("readwrite", (images) => images.delete(id));
  }
}
