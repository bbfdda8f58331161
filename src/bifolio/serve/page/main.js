// Tabs, drawers, the API key, the keyboard, and whether the server answers.
import { $, announce, hideTip, key, request } from "./core.js";
import { isDialogOpen, setUpDialogs } from "./dialogs.js";
import { setUpForks } from "./forks.js";
import { setUpKeys } from "./keys.js";
import { clearLive, redrawLive, startLive, stopLive } from "./live.js";
import { setUpModels, showModels } from "./models.js";
import { copyLast, defaults, drawContext, redraw, regenerate, setUpPlayground, stop } from "./playground.js";
import { state } from "./state.js";

const AWAKE = 3; // seconds between looks at a server that answers
const LONGEST = 5; // and, at most, at one that does not
let wait = 0;
let timer = null;

const VIEWS = ["play", "live", "tree"];

function show(name, focus = false) {
  for (const each of VIEWS) {
    const chosen = each === name;
    $(each).hidden = !chosen;
    $(`tab-${each}`).setAttribute("aria-selected", chosen);
    $(`tab-${each}`).tabIndex = chosen ? 0 : -1;
    if (chosen && focus) $(`tab-${each}`).focus();
  }
  document.body.dataset.tab = name;
  history.replaceState(null, "", `#view=${name}`); // no id: the page must not scroll
  if (name === "live") startLive();
  else stopLive();
}

// -- the server --------------------------------------------------------------------------------------------------------

async function look() {
  clearTimeout(timer);
  let answer = null;
  try {
    answer = await fetch("/ready", { signal: AbortSignal.timeout(4000) });
  } catch {
    // said below
  }
  if (answer === null) lost("The server does not answer.");
  else if (!answer.ok) lost("The engine is starting, or the server is shutting down.", "starting");
  else await found();
  timer = setTimeout(look, 1000 * (answer?.ok ? AWAKE : wait));
}

function lost(sentence, word = "not reachable") {
  wait = Math.min(LONGEST, wait + 1);
  state.isLost = true;
  $("lost").textContent = `${sentence} Next attempt in ${wait} s. Conversations are kept in this browser.`;
  $("lost").hidden = false;
  $("status").textContent = word;
  $("status").className = "pill bad";
  clearLive();
  drawContext();
}

async function found() {
  wait = 0;
  $("lost").hidden = true;
  $("status").textContent = "ready";
  $("status").className = "pill ok";
  if (state.isLost) {
    state.isLost = false;
    state.card = null; // another model may be served now
    announce("The server answers again.");
    if (!$("live").hidden) startLive();
  }
  if (state.card || !$("key-form").hidden) return;
  try {
    const list = await (await request("/v1/models")).json();
    showModels(list.data);
  } catch {
    // the key form is open, or the next look will tell
  }
}

// -- controls ------------------------------------------------------------------------------------------------------------

function drawer(button, name) {
  const toggle = (open) => {
    document.body.classList.toggle(name, open);
    $(button).setAttribute("aria-expanded", document.body.classList.contains(name));
  };
  $(button).onclick = () => toggle();
  return toggle;
}

$("tab-play").onclick = () => show("play");
$("tab-live").onclick = () => show("live");
$("tab-tree").onclick = () => show("tree");
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const place = VIEWS.findIndex((name) => !$(name).hidden);
  if (step) show(VIEWS[(place + step + VIEWS.length) % VIEWS.length], true);
});
const toggleSidebar = drawer("show-sidebar", "with-sidebar");
const togglePanel = drawer("show-panel", "with-panel");
$("close-panel").onclick = () => {
  togglePanel(false);
  $("show-panel").focus();
};
$("sidebar").addEventListener("click", (event) => event.target === $("sidebar") && toggleSidebar(false));
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key-form").hidden = true;
  state.card = null;
  look();
  if (!$("live").hidden) startLive();
};
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || isDialogOpen()) return; // a dialog closes itself
  hideTip();
  if (stop()) return;
  if (document.activeElement === $("prompt")) $("thread").focus();
  toggleSidebar(false);
  if (innerWidth < 1100) togglePanel(false);
});
document.addEventListener("lost", look);
document.addEventListener("theme", redrawLive);
addEventListener("online", look);

// In the playground, whichever view is open.
const inPlayground = (work) => () => {
  show("play");
  work();
};
setUpDialogs();
setUpModels(() => {
  defaults();
  drawContext();
  if (!state.controller) redraw();
});
setUpPlayground();
setUpForks();
setUpKeys({
  newChat: inPlayground(() => $("new-chat").click()),
  search: inPlayground(() => {
    toggleSidebar(true);
    $("search").focus();
  }),
  input: inPlayground(() => $("prompt").focus()),
  regenerate: inPlayground(regenerate),
  copy: inPlayground(copyLast),
});
if (innerWidth >= 1100) togglePanel(true);
show(VIEWS.find((name) => location.hash === `#view=${name}`) ?? "play");
look();
