// An answer token by token: probabilities in colour, or draft tokens that were accepted and rejected.
import { hideTip, make, showTip } from "./core.js";

const SHADES = [0.05, 0.2, 0.5, 0.8]; // probabilities at which the colour changes

// Tokens with their chances, from either shape of logprobs.
export function scored(logprobs, chat) {
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

// The text of several tokens: bytes of one character may be spread over them.
export const joined = (texts) => new TextDecoder().decode(new Uint8Array(texts.flatMap(asBytes)));

// Draw the new tokens of a node; the target remembers how far it has come.
//
// Token texts are followed along the answer's text. A token that does not continue it is a special token (such as the
// end of the text) and is not drawn; bytes that are no character yet wait for those that complete it.
export function renderTokens(target, node, view) {
  const progress = (target.progress ??= { next: 0, offset: 0, held: [] });
  const done = Boolean(node.finish);
  const tokens = node.tokens ?? [];
  const guesses = new Map((node.drafts ?? []).map((draft) => [draft.position, draft]));
  while (progress.next < tokens.length) {
    const group = [...progress.held, tokens[progress.next]];
    const bytes = group.flatMap((token) => token.bytes);
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
    const last = progress.next === tokens.length - 1;
    if (text.endsWith("\ufffd") && bytes.length < 4 && !(done && last)) {
      progress.held = group;
      progress.next += 1;
      continue;
    }
    const seen = visible(text, node.text, progress.offset, done);
    if (seen === null) return; // its text has not come yet
    if (view === "drafts") addRejected(target, guesses, progress.next);
    if (seen) target.append(span(seen, group, view, guesses, progress.next));
    progress.offset += seen.length;
    progress.held = [];
    progress.next += 1;
  }
}

// The part of a token's text that the answer shows here: "" for a special token, null while that is open.
function visible(token, text, offset, done) {
  if (text.startsWith(token, offset)) return token;
  const trimmed = token.replace(/^ /, "");
  if (!offset && trimmed && text.startsWith(trimmed)) return trimmed;
  const rest = text.slice(offset);
  return !done && token.startsWith(rest) ? null : "";
}

function span(text, group, view, guesses, position) {
  const node = make("span", { className: "token", textContent: text });
  if (view === "drafts") {
    if (wasGuessed(guesses, position)) node.classList.add("accepted");
  } else {
    node.classList.add(shade(group[0].logprob));
    node.tip = group.map(describe).join("\n\n");
  }
  return node;
}

function wasGuessed(guesses, position) {
  for (let back = 0; back < 64; back += 1) {
    const draft = guesses.get(position - back);
    if (draft) return back < draft.accepted;
  }
  return false;
}

// Rejected draft tokens stand, struck out, before the token that was sampled instead.
function addRejected(target, guesses, position) {
  for (let back = 0; back < 64; back += 1) {
    const draft = guesses.get(position - back);
    if (!draft) continue;
    if (draft.accepted !== back || draft.accepted === draft.tokens.length) return;
    target.append(make("del", { className: "rejected", textContent: joined(draft.tokens.slice(draft.accepted)) }));
    return;
  }
}

const shade = (logprob) => `p${SHADES.filter((limit) => Math.exp(logprob) > limit).length}`;
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(2).padStart(6)} %`;

function describe(token) {
  const rows = [...token.top].sort((a, b) => b[1] - a[1]).map(
    ([text, logprob]) => `${percent(logprob)}  ${JSON.stringify(text)}${text === token.text ? "  ◂" : ""}`);
  return rows.length ? rows.join("\n") : percent(token.logprob);
}

export function watchTokens(target) {
  target.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".token");
    if (token?.tip) showTip(token.tip, event.clientX, event.clientY);
    else hideTip();
  });
  target.addEventListener("pointerleave", hideTip);
}

export function draftSummary(node) {
  const drafts = node.drafts ?? [];
  const guessed = drafts.reduce((sum, draft) => sum + draft.tokens.length, 0);
  if (!guessed) return "";
  const accepted = drafts.reduce((sum, draft) => sum + draft.accepted, 0);
  return `${accepted} of ${guessed} draft tokens accepted (${Math.round((100 * accepted) / guessed)} %)`;
}

export function drawLegend(target, view) {
  const chips = {
    chances: [make("span", { textContent: "probability" }), ...[0, 1, 2, 3, 4].map((level) => make("i", { className: `p${level}` })),
              make("span", { className: "muted", textContent: "low to high; point at a token for its rivals" })],
    drafts: [make("span", { className: "token accepted", textContent: "accepted draft" }),
             make("del", { className: "rejected", textContent: "rejected draft" }),
             make("span", { className: "muted", textContent: "other tokens were not drafted" })],
  };
  target.hidden = view === "text";
  target.replaceChildren(...(chips[view] ?? []));
}
