// The playground: joins the message field, the conversation and the panels with the API.

import { ApiError, apiKey, chat, fleet, getJson, setApiKey, trace } from "./api.js";
import { Composer, contentOf } from "./composer.js";
import { Conversation } from "./conversation.js";
import { drawFleet, drawFleetProblem, drawTimeline, drawTimelineProblem } from "./panels.js";

const FLEET_EVERY_MS = 2000;
const TRACE_EVERY_MS = 600;

const field = (id) => document.getElementById(id);

let messages = [];
let running = null; // the AbortController of the request that is being answered
let shownTrace = null; // the id whose timeline is drawn

const conversation = new Conversation({ onSelect: selectTrace });
const composer = new Composer({
  onSend: send,
  onStop: () => running?.abort(),
  onRefuse: (message) => conversation.error(new ApiError(message)),
});

function request(extra) {
  const system = field("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, ...extra],
    temperature: Number(field("temperature").value),
    max_tokens: Number(field("max-tokens").value),
  };
  if (field("thinking").checked) body.chat_template_kwargs = { enable_thinking: true };
  return body;
}

async function send(text, items) {
  const turn = conversation.user(text, items);
  const controller = new AbortController();
  const history = messages; // "New chat" begins another one meanwhile
  const answer = conversation.answer();
  running = controller;
  composer.setBusy(true);
  let poll = null;
  try {
    const asked = { role: "user", content: await contentOf(text, items) };
    const onStart = (id) => {
      answer.begin(id);
      selectTrace(id);
      poll = setInterval(() => refreshTrace(id), TRACE_EVERY_MS);
    };
    try {
      await chat(request([asked]), { signal: controller.signal, onStart, onEvent: (event) => answer.take(event) });
      answer.end();
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      answer.end("stopped");
    }
    history.push(asked, { role: "assistant", content: answer.text });
  } catch (error) {
    if (error.id) {
      answer.begin(error.id);
      selectTrace(error.id);
    }
    if (answer.text) answer.end();
    else answer.node.remove();
    if (history === messages) giveBack(turn, text, items);
    conversation.error(error);
  } finally {
    clearInterval(poll);
    if (running === controller) {
      running = null;
      composer.setBusy(false);
    }
    if (answer.id) await settleTrace(answer.id);
  }
}

/** Put a message that failed back into its field: it is no part of the conversation. */
function giveBack(turn, text, items) {
  if (composer.field.value || composer.items.length) {
    turn.classList.add("failed");
  } else {
    turn.remove();
    composer.fill(text, items);
  }
}

/** Draw a request's timeline until it has ended: the gateway learns a moment later that we have stopped. */
async function settleTrace(id) {
  for (let attempt = 0; attempt < 6; attempt += 1) {
    const found = await refreshTrace(id);
    if (!found || found.state !== "running") return;
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

function selectTrace(id, { focus = false } = {}) {
  shownTrace = id;
  if (id) refreshTrace(id);
  if (focus) {
    field("timeline").focus({ preventScroll: true });
    field("timeline").scrollIntoView({ block: "nearest" });
  }
}

async function refreshTrace(id) {
  if (id !== shownTrace) return null;
  try {
    const found = await trace(id);
    if (id === shownTrace) drawTimeline(found);
    return found;
  } catch (error) {
    if (id === shownTrace) drawTimelineProblem(error.message);
    return null;
  }
}

function showReadiness(ready, text) {
  field("readiness").classList.toggle("ready", ready);
  // A live region: the same words must not be read out again.
  if (field("readiness-text").textContent !== text) field("readiness-text").textContent = text;
}

async function refreshFleet() {
  if (document.visibilityState !== "visible") return;
  try {
    const state = await fleet();
    drawFleet(state);
    showReadiness(state.ready, state.ready ? "ready" : `no ready ${state.missing.join(", ")}`);
    if (!field("model").textContent) await showModel();
  } catch (error) {
    drawFleetProblem(error.message);
    showReadiness(false, error.status === 401 ? "needs an API key" : "not reachable");
  }
}

async function showModel() {
  const models = (await getJson("v1/models")).data;
  field("model").textContent = models[0]?.id ?? "";
}

function newChat() {
  running?.abort();
  running = null;
  messages = [];
  conversation.clear();
  composer.fill("", []);
  composer.setBusy(false);
  shownTrace = null;
  drawTimelineProblem("The steps of a request appear here once it is sent.");
  composer.field.focus();
}

field("new-chat").addEventListener("click", newChat);
field("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  field("settings").open = false;
  composer.field.focus();
});
field("api-key").value = apiKey();
field("api-key").addEventListener("change", () => {
  setApiKey(field("api-key").value.trim());
  refreshFleet();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && field("settings").open) {
    field("settings").open = false;
    field("settings").querySelector("summary").focus();
  }
});
document.addEventListener("visibilitychange", refreshFleet);
// On a touch screen the focus would bring up a keyboard that nobody has asked for.
if (matchMedia("(pointer: fine)").matches) composer.field.focus({ preventScroll: true });
setInterval(refreshFleet, FLEET_EVERY_MS);
refreshFleet();
