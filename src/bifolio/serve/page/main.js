// Tabs, the key, and whether the server is there.
import { $, key, request } from "./core.js";
import { startLive, stopLive } from "./live.js";
import { setUp } from "./playground.js";

function show(name) {
  for (const each of ["play", "live"]) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
  }
  history.replaceState(null, "", name === "live" ? "#view=live" : "#view=play"); // no id: the page must not scroll
  if (name === "live") startLive();
  else stopLive();
}

async function look() {
  const status = $("status");
  try {
    const answer = await fetch("/ready");
    status.textContent = answer.ok ? "ready" : "engine starting";
    status.className = answer.ok ? "pill ok" : "pill bad";
    if (answer.ok && !$("model").textContent && $("key-form").hidden) {
      const list = await (await request("/v1/models")).json();
      $("model").textContent = `${list.data[0].id} · ${list.data[0].max_model_len} tokens`;
    }
  } catch (error) {
    if (error.status !== 401) {
      status.textContent = "not reachable";
      status.className = "pill bad";
    }
  }
  setTimeout(look, 3000);
}

$("tab-play").onclick = () => show("play");
$("tab-live").onclick = () => show("live");
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key-form").hidden = true;
  $("model").textContent = "";
  look();
  if (!$("live").hidden) startLive();
};
setUp();
show(location.hash === "#view=live" ? "live" : "play");
look();
