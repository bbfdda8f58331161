// From a message to its answer: the request, its stream, and the nodes that grow with it.
import { BeamTree } from "./beams.js";
import { batches, onFrame, request } from "./core.js";
import { checkSize, contentOf } from "./images.js";
import { OptionError, describe, requestOptions, variants } from "./settings.js";
import { state } from "./state.js";
import { addNode, newId, pathTo, save } from "./store.js";
import { scored } from "./tokens.js";

const TOP = 5; // rivals of each token
const SAVE_SECONDS = 2;
const INTERVAL_MS = 50; // events that arrive together cost the browser less
export const isRunning = () => state.controller !== null;
export const stopRun = () => state.controller?.abort();

// The bodies of the requests, one for each variant; raises OptionError with the variant in it.
export function bodies(conversation, parent) {
  return variants().map((variant) => {
    try {
      return { variant, body: bodyOf(conversation, parent, requestOptions(variant)) };
    } catch (error) {
      if (error instanceof OptionError) error.variant = variant;
      throw error;
    }
  });
}

function bodyOf(conversation, parent, options) {
  const path = pathTo(conversation, parent);
  const wanted = { ...(state.card && { model: state.card.id }), ...options, stream: true, return_token_ids: true,
                   stream_options: { include_usage: true, include_steps: true, interval_ms: INTERVAL_MS } };
  const scores = state.view !== "text";
  if (conversation.mode === "text") {
    return { ...wanted, prompt: path.map((node) => node.text).join(""), ...(scores && { logprobs: TOP }) };
  }
  const messages = path.map((node) => ({ role: node.role, content: contentOf(node) }));
  checkSize(messages);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  return { ...wanted, messages, ...(scores && { logprobs: true, top_logprobs: TOP }) };
}

// Answer the message `parent`; `view` draws: {structure(), update(node), done(node)}.
export async function answer(conversation, parent, requests, view) {
  const controller = new AbortController();
  state.controller = controller;
  const group = newId();
  const streams = requests.map(({ variant, body }) =>
    new AnswerStream(conversation, parent, body, { group, variant: requests.length > 1 ? variant : undefined,
                                                   settings: describe(variant) }, view));
  conversation.leaf = streams[0].nodes[0].id;
  save(conversation);
  view.structure();
  try {
    await Promise.all(streams.map((stream) => stream.read(controller.signal)));
  } finally {
    if (state.controller === controller) state.controller = null;
    save(conversation);
    view.structure();
  }
}

class AnswerStream {
  constructor(conversation, parent, body, fields, view) {
    Object.assign(this, { conversation, parent, body, fields, view });
    this.path = body.messages ? "/v1/chat/completions" : "/v1/completions";
    this.began = performance.now();
    this.saved = this.began;
    this.beams = [];
    this.nodes = [];
    this.nodeAt(0);
  }

  // Every choice is a node; the beams of a search are one.
  nodeAt(index) {
    const place = this.body.beam_search ? 0 : index;
    while (this.nodes.length <= place) {
      const node = addNode(this.conversation, { parent: this.parent, role: "assistant", ...this.fields,
                                                  model: this.body.model, finish: null });
      Object.assign(node, { tokens: [], drafts: [], stats: { tokens: 0 }, hasScores: this.body.logprobs !== undefined });
      if (this.body.beam_search) node.beams = new BeamTree();
      this.nodes.push(node);
      if (this.nodes.length > 1) this.view.structure();
    }
    return this.nodes[place];
  }

  async read(signal) {
    try {
      const response = await request(this.path, { body: this.body, signal });
      for await (const events of batches(response)) this.take(events);
      this.end(null);
    } catch (error) {
      this.end(error);
    }
  }

  take(events) {
    const now = performance.now();
    for (const event of events) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) this.takeUsage(event.usage);
      if (event.steps) this.takeSteps(event.steps);
      for (const choice of event.choices) this.takeChoice(choice, now);
    }
    for (const node of this.nodes) onFrame(node.id, () => this.view.update(node));
    if (now - this.saved > 1000 * SAVE_SECONDS) {
      this.saved = now;
      save(this.conversation); // a closed page loses little
    }
  }

  takeUsage(usage) {
    for (const { stats } of this.nodes) {
      stats.prompt = usage.prompt_tokens;
      stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }

  takeSteps(steps) {
    for (const draft of steps.drafts) this.nodeAt(draft.index).drafts.push(draft);
    for (const step of steps.beams) this.nodes[0].beams?.take(step);
  }

  takeChoice(choice, now) {
    const node = this.nodeAt(choice.index);
    const chat = this.body.messages !== undefined;
    const isRival = this.body.beam_search && choice.index > 0; // the best beam is the answer
    const count = isRival ? 0 : choice.token_ids?.length ?? 0;
    if (count) {
      const { stats } = node;
      stats.first ??= now - this.began;
      if (!stats.tokens) stats.firstCount = count;
      stats.tokens += count;
      stats.seconds = (now - this.began - stats.first) / 1000;
    }
    if (this.body.beam_search) this.beams[choice.index] = { ids: choice.token_ids };
    if (isRival) return;
    node.text += chat ? choice.delta.content ?? "" : choice.text;
    for (const call of choice.delta?.tool_calls ?? []) node.text += JSON.stringify(call.function);
    node.tokens.push(...scored(choice.logprobs, chat));
    if (choice.finish_reason) node.finish = choice.finish_reason;
  }

  end(error) {
    for (const node of this.nodes) {
      node.finish ??= reason(error);
      if (error && node.finish === "error") node.error = error.message;
      if (!error && node.beams) node.beams.finish(this.beams.map((beam) => beam.ids));
      onFrame(node.id, () => this.view.update(node));
      this.view.done(node);
    }
  }
}

// Why a stream ended without a finish reason. `fetch` raises TypeError when the network fails.
function reason(error) {
  if (error === null) return "lost";
  if (error.name === "AbortError") return "stopped";
  return error instanceof TypeError ? "lost" : "error";
}
