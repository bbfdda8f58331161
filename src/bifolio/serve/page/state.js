// The state that the views share: the open conversation, the view of answers, and the server as it was last seen.
import { recall } from "./store.js";

export const state = {
  conversation: null,
  view: recall("view", "text"), // text, chances or drafts
  cards: [], // of the models, from /v1/models
  card: null, // of the chosen model
  isLost: false, // the server does not answer
  controller: null, // of the run in flight
};
