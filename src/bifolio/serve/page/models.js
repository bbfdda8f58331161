// The model picker: one entry for each model of /v1/models.
import { $, make } from "./core.js";
import { state } from "./state.js";
import { recall, remember } from "./store.js";

let changed = () => {};

export function setUpModels(handler) {
  changed = handler;
  $("model").onchange = () => {
    remember("model", $("model").value);
    choose();
  };
}

export function showModels(cards) {
  state.cards = cards;
  const options = cards.map(({ id, max_model_len: length }) =>
    make("option", { value: id, textContent: length ? `${id} · ${length} tokens` : id }));
  $("model").replaceChildren(...options);
  $("model").hidden = !cards.length;
  const wanted = recall("model", "");
  $("model").value = cards.some(({ id }) => id === wanted) ? wanted : cards[0]?.id ?? "";
  choose();
}

function choose() {
  state.card = state.cards.find(({ id }) => id === $("model").value) ?? null;
  changed();
}
