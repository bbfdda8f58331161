// The playground: a prompt or a chat, every option, and the answer token by token.
import { $, events, hideTip, make, request, showTip } from "./core.js";
import { drawTree } from "./tree.js";

const NUMBERS = [
  ["Length and chance", [
    ["max_tokens", "most tokens", 200], ["temperature", "temperature", ""], ["top_p", "top-p", ""], ["top_k", "top-k", ""],
    ["min_p", "min-p", ""], ["typical_p", "typical-p", ""], ["seed", "seed", ""], ["n", "completions", 1],
    ["min_tokens", "least tokens", ""],
  ]],
  ["Repetition", [
    ["repetition_penalty", "repetition penalty", ""], ["presence_penalty", "presence penalty", ""],
    ["frequency_penalty", "frequency penalty", ""], ["no_repeat_ngram_size", "no repeated n-gram", ""],
    ["dry_multiplier", "DRY multiplier", ""], ["dry_base", "DRY base", ""], ["dry_allowed_length", "DRY free length", ""],
    ["xtc_probability", "XTC probability", ""], ["xtc_threshold", "XTC threshold", ""],
  ]],
  ["Beam search", [
    ["beam_width", "beams (0: off)", 0], ["length_penalty", "length penalty", 1], ["num_groups", "groups", 1],
    ["diversity_penalty", "diversity penalty", 0],
  ]],
];
const GRAMMARS = [["", "no constraint"], ["json", "JSON schema"], ["regex", "regular expression"],
                  ["choice", "one of these lines"], ["grammar", "Lark grammar"]];
const BEAM_FIELDS = ["length_penalty", "num_groups", "diversity_penalty"];
const TOP = 5;
let abort = null;
let conversation = [];

export function setUp() {
  const fields = $("fields");
  for (const [title, rows] of NUMBERS) {
    fields.append(make("h3", { textContent: title }));
    for (const [name, label, value] of rows) fields.append(field(name, label, value));
  }
  fields.append(make("h3", { textContent: "Text" }));
  fields.append(whole("stop", "stop texts, one a line"), whole("bad_words", "texts that must not come, one a line"));
  fields.append(whole("logit_bias", "logit bias, as JSON: {\"50\": 2.5}"), check("ignore_eos", "ignore the end of text"));
  fields.append(make("h3", { textContent: "Structure" }), select(), whole("structure", "the constraint"));
  $("run").onclick = run;
  $("stop").onclick = () => abort && abort.abort();
  $("clear").onclick = clear;
  $("mode-text").onclick = () => setMode(false);
  $("mode-chat").onclick = () => setMode(true);
  $("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  };
  $("output").addEventListener("pointermove", (event) => {
    const token = event.target.closest(".token");
    if (token) showTip(token.dataset.tip, event.clientX, event.clientY);
    else hideTip();
  });
  $("output").addEventListener("pointerleave", hideTip);
}

function field(name, label, value) {
  const input = make("input", { id: `o-${name}`, inputMode: "decimal", value, placeholder: "default" });
  return make("div", {}, make("label", { htmlFor: input.id, textContent: label }), input);
}

function whole(name, label) {
  const area = make("textarea", { id: `o-${name}`, rows: name === "structure" ? 3 : 1 });
  return make("div", { className: "whole" }, make("label", { htmlFor: area.id, textContent: label }), area);
}

function check(name, label) {
  const box = make("input", { id: `o-${name}`, type: "checkbox" });
  return make("div", { className: "check" }, box, make("label", { htmlFor: box.id, textContent: label }));
}

function select() {
  const choices = GRAMMARS.map(([value, textContent]) => make("option", { value, textContent }));
  return make("div", {}, make("label", { htmlFor: "o-kind", textContent: "kind" }),
              make("select", { id: "o-kind" }, ...choices));
}

function setMode(chat) {
  document.body.classList.toggle("chat", chat);
  $("mode-chat").classList.toggle("on", chat);
  $("mode-text").classList.toggle("on", !chat);
  $("prompt-label").textContent = chat ? "Message" : "Prompt";
  $("prompt").rows = chat ? 3 : 5;
  clear();
  $("prompt").value = chat ? "" : "Once upon a time";
}

function clear() {
  conversation = [];
  $("history").replaceChildren();
  $("output").replaceChildren();
  $("beams").hidden = $("legend").hidden = $("problem").hidden = true;
  $("speed").textContent = "";
}

const lines = (name) => $(`o-${name}`).value.split("\n").filter((line) => line.length);

// The body of the request; raises when a field cannot be read.
function body(chat) {
  const options = { stream: true, stream_options: { include_usage: true } };
  for (const [, rows] of NUMBERS) {
    for (const [name] of rows) {
      const text = $(`o-${name}`).value.trim();
      if (!text || name === "beam_width" || BEAM_FIELDS.includes(name)) continue;
      const value = Number(text);
      if (Number.isNaN(value)) throw new Error(`${name} is not a number: ${text}`);
      options[name] = value;
    }
  }
  const width = Number($("o-beam_width").value || 0);
  if (width > 0) {
    options.beam_search = { width };
    for (const name of BEAM_FIELDS) options.beam_search[name] = Number($(`o-${name}`).value);
    options.n = Math.min(Math.max(options.n || 1, width), width);
  }
  if (lines("stop").length) options.stop = lines("stop");
  if (lines("bad_words").length) options.bad_words = lines("bad_words");
  if ($("o-logit_bias").value.trim()) options.logit_bias = JSON.parse($("o-logit_bias").value);
  if ($("o-ignore_eos").checked) options.ignore_eos = true;
  structure(options);
  if (chat) {
    options.messages = [...conversation, { role: "user", content: $("prompt").value }];
    if ($("system").value) options.messages.unshift({ role: "system", content: $("system").value });
    return { ...options, logprobs: true, top_logprobs: TOP };
  }
  return { ...options, prompt: $("prompt").value, logprobs: TOP };
}

function structure(options) {
  const kind = $("o-kind").value;
  const text = $("o-structure").value;
  if (!kind) return;
  const value = kind === "json" ? JSON.parse(text) : kind === "choice" ? lines("structure") : text;
  options.structured_outputs = { [kind]: value };
}

async function run() {
  if (abort) return;
  const chat = document.body.classList.contains("chat");
  $("problem").hidden = true;
  let wanted;
  try {
    wanted = body(chat);
  } catch (error) {
    problem(error.message);
    return;
  }
  abort = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  const view = new View(chat, wanted);
  try {
    const path = chat ? "/v1/chat/completions" : "/v1/completions";
    const answer = await request(path, { body: wanted, signal: abort.signal });
    for await (const event of events(answer)) view.take(event);
  } catch (error) {
    if (error.name === "AbortError") view.note("stopped");
    else problem(error.message);
  } finally {
    abort = null;
    $("run").disabled = false;
    $("stop").disabled = true;
    view.end();
  }
}

function problem(message) {
  $("problem").textContent = message;
  $("problem").hidden = false;
}

// One answer on its way to the screen.
class View {
  constructor(chat, wanted) {
    this.chat = chat;
    this.wanted = wanted;
    this.choices = [];
    this.began = performance.now();
    this.first = null;
    this.count = 0;
    $("output").replaceChildren();
    $("beams").hidden = true;
    $("legend").hidden = false;
    if (chat) {
      conversation.push({ role: "user", content: $("prompt").value });
      this.bubble("user", $("prompt").value);
      $("prompt").value = "";
    }
  }

  bubble(role, text) {
    $("history").append(make("div", { className: `message ${role}`, textContent: text }));
  }

  choice(index) {
    while (this.choices.length <= index) {
      const node = make("div", { className: "choice" });
      if (!this.chat && !this.wanted.beam_search) {
        node.append(make("span", { className: "given", textContent: this.wanted.prompt }));
      }
      $("output").append(node);
      this.choices.push({ node, text: "", tokens: [], bytes: [], held: null, beam: null });
    }
    return this.choices[index];
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    for (const item of event.choices) {
      const choice = this.choice(item.index);
      const text = this.chat ? item.delta.content || "" : item.text;
      choice.text += text;
      if (item.delta && item.delta.tool_calls) choice.text += JSON.stringify(item.delta.tool_calls[0].function);
      if (item.beam) choice.beam = item.beam;
      for (const token of scored(item.logprobs, this.chat)) {
        this.first ??= performance.now();
        this.count += 1;
        addToken(choice, token);
      }
      if (item.finish_reason === "stop" && typeof item.stop_reason !== "string" && choice.tokens.length) {
        choice.node.lastChild.classList.add("ending"); // the end of text is no part of the text
      }
    }
    this.speed();
  }

  speed() {
    if (this.first === null) return;
    const seconds = (performance.now() - this.first) / 1000;
    const rate = seconds > 0.05 && this.count > 1 ? `${((this.count - 1) / seconds).toFixed(0)} tokens/s · ` : "";
    const wait = `first after ${(this.first - this.began).toFixed(0)} ms`;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const hits = cached ? ` · ${cached} of ${this.usage.prompt_tokens} prompt tokens cached` : "";
    $("speed").textContent = `${this.count} tokens · ${rate}${wait}${hits}`;
  }

  note(text) {
    this.stopped = text;
  }

  end() {
    this.speed();
    if (this.stopped) $("speed").textContent += ` · ${this.stopped}`;
    if (this.chat && this.choices.length) {
      conversation.push({ role: "assistant", content: this.choices[0].text });
      this.bubble("assistant", this.choices[0].text);
    }
    if (this.wanted.beam_search && this.choices.length) drawTree($("beams"), this.choices, this.wanted.prompt);
  }
}

// Tokens with their chances, from either shape of logprobs.
function scored(logprobs, chat) {
  if (!logprobs) return [];
  if (chat) {
    return (logprobs.content || []).map((item) => ({
      text: item.token, logprob: item.logprob, bytes: item.bytes,
      top: item.top_logprobs.map((rival) => [rival.token, rival.logprob]),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text, logprob: logprobs.token_logprobs[index], bytes: asBytes(text),
    top: Object.entries((logprobs.top_logprobs && logprobs.top_logprobs[index]) || {}),
  }));
}

function asBytes(text) {
  if (!text.startsWith("bytes:")) return [...new TextEncoder().encode(text)];
  return [...text.matchAll(/\\x([0-9a-f]{2})/g)].map((match) => parseInt(match[1], 16));
}

// Bytes that do not make a character yet are shown together with those that complete it.
function addToken(choice, token) {
  choice.tokens.push(token);
  const bytes = [...(choice.held ? choice.held.bytes : []), ...token.bytes];
  const text = new TextDecoder().decode(new Uint8Array(bytes));
  const tip = [...(choice.held ? [choice.held.tip] : []), describe(token)].join("\n\n");
  const partial = text.endsWith("\ufffd") && bytes.length < 4;
  const span = choice.held ? choice.held.span : make("span", { className: `token ${shade(token.logprob)}` });
  span.textContent = partial ? "" : text;
  span.dataset.tip = tip;
  if (!choice.held) choice.node.append(span);
  choice.held = partial ? { bytes, tip, span } : null;
}

function shade(logprob) {
  const chance = Math.exp(logprob);
  return `p${chance > 0.8 ? 4 : chance > 0.5 ? 3 : chance > 0.2 ? 2 : chance > 0.05 ? 1 : 0}`;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(2).padStart(6)} %`;

function describe(token) {
  const rows = [...token.top].sort((a, b) => b[1] - a[1]).map(
    ([text, logprob]) => `${percent(logprob)}  ${JSON.stringify(text)}${text === token.text ? "  ◂" : ""}`);
  return rows.length ? rows.join("\n") : percent(token.logprob);
}
