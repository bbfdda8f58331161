// The options of a request, under the names of the API. Empty fields are left out of the request: their placeholders
// show the values that the server then uses.
import { $, make } from "./core.js";
import { recall, remember } from "./store.js";

const NUMBERS = [
  ["Length", [
    ["max_tokens", "Longest answer, in tokens"], ["min_tokens", "Shortest answer, in tokens"],
    ["n", "Number of answers"], ["seed", "Equal seeds give equal answers"],
  ]],
  ["Sampling", [
    ["temperature", "0: always the likeliest token; higher: more variety"],
    ["top_p", "Likeliest tokens that together have this probability"], ["top_k", "Number of likeliest tokens; -1: all"],
    ["min_p", "Least probability, relative to the likeliest token"], ["typical_p", "Locally typical sampling; 1: off"],
  ]],
  ["Repetition", [
    ["repetition_penalty", "Above 1: tokens that occurred become less likely"],
    ["presence_penalty", "Subtracted from the logits of tokens that occurred"],
    ["frequency_penalty", "Subtracted once for each occurrence"],
    ["no_repeat_ngram_size", "No sequence of so many tokens comes twice; 0: off"],
    ["dry_multiplier", "Penalty for repeating a sequence; 0: off"], ["dry_base", "Growth of the penalty with the length"],
    ["dry_allowed_length", "Sequences up to this length may repeat"],
    ["xtc_probability", "How often the likeliest tokens are left out"],
    ["xtc_threshold", "Probability above which a token counts as likely"],
  ]],
  ["Beam search", [
    ["beam_width", "Number of beams; 0: no search"], ["length_penalty", "Above 0: longer texts are preferred"],
    ["num_groups", "Groups of beams that differ from each other"],
    ["diversity_penalty", "Penalty for tokens that another group chose"],
  ]],
];
const BEAMS = { beam_width: 0, length_penalty: 1, num_groups: 1, diversity_penalty: 0 };
const TEXTS = [
  ["stop", "Texts that end the answer, one in each line"], ["bad_words", "Texts that must not occur, one in each line"],
  ["logit_bias", 'Added to the logits of token ids, as JSON: {"50": 2.5}'],
];
const KINDS = [["", "none"], ["json", "json: a JSON schema"], ["regex", "regex: a regular expression"],
               ["choice", "choice: one of these lines"], ["grammar", "grammar: Lark"]];
const BEAM_NAMES = { beam_width: "beam_search.width" };
const labelOf = (name) => (name in BEAMS ? BEAM_NAMES[name] ?? `beam_search.${name}` : name);

const START = [{ max_tokens: "512" }, { max_tokens: "512", temperature: "0" }];
const values = recall("settings", structuredClone(START));
let shown = 0; // the variant whose values the fields hold
let changed = () => {};

export class OptionError extends Error {
  constructor(name, message) {
    super(`${labelOf(name)} ${message}`);
    this.field = name;
  }
}

export function setUpSettings(onChange) {
  changed = onChange;
  const fields = $("fields");
  for (const [title, rows] of NUMBERS) {
    const group = make("details", { className: "options", open: title === "Length" || title === "Sampling" },
                       make("summary", { textContent: title }));
    const grid = make("div", { className: "grid" });
    for (const [name, hint] of rows) grid.append(field(name, hint, make("input", { inputMode: "decimal" })));
    group.append(grid);
    fields.append(group);
  }
  const text = make("div", { className: "grid" });
  for (const [name, hint] of TEXTS) text.append(field(name, hint, make("textarea", { rows: 1, className: "whole" })));
  const box = make("input", { id: "o-ignore_eos", type: "checkbox" });
  text.append(make("div", { className: "check" }, box, make("label", { htmlFor: box.id, textContent: "ignore_eos" })));
  fields.append(make("details", { className: "options" }, make("summary", { textContent: "Text" }), text));
  const choices = KINDS.map(([value, textContent]) => make("option", { value, textContent }));
  fields.append(make("details", { className: "options" }, make("summary", { textContent: "Structure" }),
    make("div", { className: "grid" }, field("kind", "Kind of constraint", make("select", { className: "whole" }, ...choices), "structured_outputs"),
         field("structure", "The schema, expression, lines or grammar", make("textarea", { rows: 3, className: "whole" }), "constraint"))));
  fields.addEventListener("input", () => {
    readFields();
    keep();
  });
  for (const radio of document.querySelectorAll("input[name=variant]")) {
    radio.onchange = () => {
      shown = Number(radio.value);
      fillFields();
    };
  }
  $("compare").checked = recall("compare", false);
  $("compare").onchange = () => {
    remember("compare", $("compare").checked);
    showCompare();
    changed();
  };
  $("reset").onclick = () => {
    values[shown] = structuredClone(START[shown]);
    fillFields();
    keep();
  };
  showCompare();
  fillFields();
}

function field(name, hint, input, label = labelOf(name)) {
  Object.assign(input, { id: `o-${name}`, title: hint });
  input.setAttribute("aria-description", hint);
  return make("div", { className: input.className }, make("label", { htmlFor: input.id, textContent: label, title: hint }), input);
}

function showCompare() {
  $("variants").hidden = !$("compare").checked;
  if (!$("compare").checked && shown) {
    shown = 0;
    $("variant-0").checked = true;
    fillFields();
  }
}

const inputs = () => $("fields").querySelectorAll("input, textarea, select");

function readFields() {
  const read = {};
  for (const input of inputs()) {
    input.removeAttribute("aria-invalid");
    const value = input.type === "checkbox" ? input.checked : input.value;
    if (value !== "" && value !== false) read[input.id.slice(2)] = value;
  }
  values[shown] = read;
}

function fillFields() {
  for (const input of inputs()) {
    const value = values[shown][input.id.slice(2)];
    input.removeAttribute("aria-invalid");
    if (input.type === "checkbox") input.checked = Boolean(value);
    else input.value = value ?? "";
    if (value !== undefined && input.closest("details") && input.id !== "o-max_tokens") input.closest("details").open = true;
  }
}

function keep() {
  remember("settings", values);
  changed();
}

// Show the server's defaults where the fields are empty: the model's, and those of OpenAI's API.
export function showDefaults(defaults, mode) {
  const known = { ...BEAMS, n: 1, seed: "random", max_tokens: mode === "chat" ? "rest of context" : 16, ...defaults };
  for (const [, rows] of NUMBERS) {
    for (const [name] of rows) $(`o-${name}`).placeholder = String(known[name] ?? "");
  }
}

// Variants of the next run: one, or two to compare.
export const variants = () => ($("compare").checked ? [0, 1] : [0]);

// In words, for the line below an answer.
export function describe(variant) {
  return Object.entries(values[variant])
    .filter(([name]) => name !== "structure")
    .map(([name, value]) => (value === true ? name : `${name === "kind" ? "structured_outputs" : labelOf(name)} ${oneLine(value)}`))
    .join(" · ");
}

const oneLine = (value) => (value.length > 24 ? `${value.slice(0, 23)}…` : value).replaceAll("\n", " ");
const lines = (text) => (text ?? "").split("\n").filter((line) => line.length);

// The fields of a request body; OptionError names the field that cannot be read.
export function requestOptions(variant) {
  const given = values[variant];
  const options = {};
  for (const [, rows] of NUMBERS) {
    for (const [name] of rows) {
      if (!(name in BEAMS) && given[name] !== undefined) options[name] = number(name, given[name]);
    }
  }
  const width = number("beam_width", given.beam_width ?? "0");
  if (width > 0) {
    options.beam_search = { width };
    for (const name of ["length_penalty", "num_groups", "diversity_penalty"]) {
      if (given[name] !== undefined) options.beam_search[name] = number(name, given[name]);
    }
    options.n = width;
  }
  if (lines(given.stop).length) options.stop = lines(given.stop);
  if (lines(given.bad_words).length) options.bad_words = lines(given.bad_words);
  if (given.logit_bias) options.logit_bias = json("logit_bias", given.logit_bias);
  if (given.ignore_eos) options.ignore_eos = true;
  if (given.kind) {
    const text = given.structure ?? "";
    options.structured_outputs = { [given.kind]: given.kind === "json" ? json("structure", text)
      : given.kind === "choice" ? lines(text) : text };
  }
  return options;
}

function number(name, text) {
  const value = Number(text);
  if (!String(text).trim() || Number.isNaN(value)) throw new OptionError(name, `is not a number: ${text}`);
  return value;
}

function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new OptionError(name, `is not JSON: ${error.message}`);
  }
}

// Point at the field that cannot be read.
export function markInvalid(variant, name) {
  if (variant !== shown) $(`variant-${variant}`).click();
  const input = $(`o-${name}`);
  input.closest("details").open = true;
  input.setAttribute("aria-invalid", "true");
}
