// The two panels beside the conversation: a request's timeline, and the fleet.

import { make } from "./composer.js";
import { milliseconds } from "./conversation.js";

const STAGES = { gateway: "Gateway", encoder: "Encode", prefill: "Prefill", decode: "Decode" };
const MODALITIES = { image: "Picture", video: "Video", audio: "Sound" };

function pair(term, value) {
  const row = make("div", "fact");
  row.append(make("dt", "", term), make("dd", "", value));
  return row;
}

function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** Return a bar of a share between 0 and 1, which says its value in words too. */
function meter(label, share) {
  const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
  const row = make("div", "meter");
  const track = make("span", "meter-track");
  const fill = make("span", "meter-fill");
  fill.style.width = `${percent}%`;
  track.append(fill);
  row.append(make("span", "meter-label", label), track, make("span", "meter-value", `${percent}%`));
  return row;
}

function drawSpan(span, totalMs) {
  const row = make("li", "span");
  const track = make("span", "track");
  const bar = make("span", `bar ${STAGES[span.stage] ? span.stage : "other"}${span.running ? " running" : ""}`);
  bar.style.left = `${(100 * span.start_ms) / totalMs}%`;
  bar.style.width = `${(100 * span.duration_ms) / totalMs}%`;
  track.append(bar);
  const name = span.item === null ? span.name : `${span.name} ${span.item + 1}`;
  row.append(make("span", "span-name", name), track, make("span", "span-ms", milliseconds(span.duration_ms)));
  row.title = `${span.worker ?? span.stage}: from ${milliseconds(span.start_ms)}`;
  return row;
}

function drawAxis(totalMs) {
  const axis = make("div", "axis");
  axis.setAttribute("aria-hidden", "true");
  for (const share of [0, 0.5, 1]) axis.append(make("span", "", share ? milliseconds(share * totalMs) : "0"));
  return axis;
}

function drawMedia(items, open) {
  const list = make("ul", "media-facts");
  for (const item of items) {
    const row = make("li");
    const name = `${MODALITIES[item.modality] ?? "Item"} ${item.item + 1}`;
    const state = item.cache_hit === null ? open : item.cache_hit ? "cache hit" : "encoded";
    row.append(make("span", "media-name", name), make("span", `tag${item.cache_hit ? " hit" : ""}`, state));
    if (item.tokens !== null) row.append(make("span", "media-more", `${count(item.tokens)} tokens, ${item.worker}`));
    for (const note of item.notes) row.append(make("span", "media-note", note));
    list.append(row);
  }
  return list;
}

/** Draw the trace of a request. */
export function drawTimeline(trace) {
  const totalMs = Math.max(trace.duration_ms, 0.001);
  const running = trace.state === "running";
  const unfinished = running ? "in work" : "not finished";
  const nodes = [];
  const figures = make("dl", "figures");
  figures.append(
    pair(running ? "so far" : "in all", milliseconds(trace.duration_ms)),
    pair("first token", trace.ttft_ms === null ? "none" : milliseconds(trace.ttft_ms)),
    pair("prompt", `${count(trace.usage.prompt_tokens)}`),
    pair("cached", `${count(trace.usage.prompt_tokens_details.cached_tokens)}`),
    pair("output", `${count(trace.usage.completion_tokens)}`),
  );
  nodes.push(figures);
  if (trace.error) nodes.push(make("p", "trace-error", `ended with ${trace.status} ${trace.error}`));
  for (const [stage, title] of Object.entries(STAGES)) {
    const spans = trace.spans.filter((span) => span.stage === stage);
    if (!spans.length) continue;
    const heading = make("h3", `stage-title ${stage}`, title);
    const list = make("ol", "spans");
    list.append(...spans.map((span) => drawSpan(span, totalMs)));
    nodes.push(heading, list);
  }
  nodes.push(drawAxis(totalMs));
  if (trace.media.length) nodes.push(make("h3", "stage-title", "Media"), drawMedia(trace.media, unfinished));
  const id = make("p", "trace-id");
  id.append(make("code", "", trace.id));
  nodes.push(id);
  document.getElementById("timeline-body").replaceChildren(...nodes);
}

export function drawTimelineProblem(message) {
  document.getElementById("timeline-body").replaceChildren(make("p", "hint", message));
}

const OLD_S = 3; // the gateway asks far more often

/** Say how old a worker's figures are where a reader would take them for newer. */
function age(worker) {
  if (worker.age_s === null) return "never heard";
  return worker.age_s < OLD_S ? "" : `told ${count(Math.round(worker.age_s))} s ago`;
}

// What requests wait for, by the figure that counts them.
const WAITS = {
  waiting_full_pool: "for the full pool",
  waiting_swa_pool: "for the window pool",
  waiting_batch_tokens: "for their turn",
  waiting_running_requests: "for one of those that run to end",
  waiting_shared_prompt: "for another with the same start",
  waiting_host_memory: "for decode to take KV",
  waiting_embeddings: "for embeddings",
};

function waits(load) {
  const reasons = Object.keys(WAITS).filter((key) => load[key]);
  const parts = reasons.map((key) => `${count(load[key])} ${WAITS[key]}`);
  return `${count(load.waiting_requests)} waiting` + (parts.length ? ` (${parts.join(", ")})` : "");
}

function workerFigures(stage, worker) {
  const load = worker.load;
  const nodes = [];
  const facts = [age(worker), `${count(worker.in_work)} in work`].filter(Boolean);
  if (stage === "encoder") {
    const looked = (load.cache_hits ?? 0) + (load.cache_misses ?? 0);
    if (load.items) facts.push(`${count(load.items)} items`);
    if (looked) nodes.push(meter("cache hits", load.cache_hits / looked));
  } else {
    if (load.running_requests) facts.push(`${count(load.running_requests)} running`);
    if (load.waiting_requests) facts.push(waits(load));
    if (load.full_total_slots) nodes.push(meter("full pool", load.full_used_slots / load.full_total_slots));
    if (load.swa_total_slots) nodes.push(meter("window pool", load.swa_used_slots / load.swa_total_slots));
  }
  return [make("span", "worker-facts", facts.join(", ")), ...nodes];
}

/** Draw the state of all workers. */
export function drawFleet(fleet) {
  const nodes = [];
  for (const { stage, workers, ready, total } of fleet.stages) {
    if (!total && !fleet.missing.includes(stage)) continue; // this fleet does without
    const title = make("h3", `stage-title ${stage}`, STAGES[stage] ?? stage);
    title.append(make("small", "", ` ${ready} of ${total} ready`));
    const list = make("ul", "workers");
    for (const worker of workers) {
      const row = make("li", `worker${worker.ready ? "" : " lost"}`);
      const head = make("span", "worker-name", worker.name);
      head.prepend(make("span", "dot"));
      row.append(head);
      if (worker.ready) row.append(...workerFigures(stage, worker));
      else row.append(make("span", "worker-facts", ["not ready", age(worker)].filter(Boolean).join(", ")));
      list.append(row);
    }
    nodes.push(title, list);
  }
  document.getElementById("fleet-body").replaceChildren(...nodes);
}

export function drawFleetProblem(message) {
  document.getElementById("fleet-body").replaceChildren(make("p", "hint", message));
}
