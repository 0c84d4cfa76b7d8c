// The conversation as it is shown: turns, streamed answers, errors. Text of the model goes in as text only.

import { make, preview } from "./composer.js";

const FINISH = {
  length: "cut at the token limit",
  tool_calls: "ended with a tool call",
  stopped: "stopped",
};

const NEAR_PX = 48;

function milliseconds(value) {
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
}

/** One answer on the page while it grows and afterwards. */
class Answer {
  constructor(log, onSelect) {
    this.log = log;
    this.id = null;
    this.text = "";
    this.usage = null;
    this.finish = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.node = make("article", "turn answer waiting");
    this.node.setAttribute("aria-label", "Answer");
    this.node.setAttribute("aria-busy", "true");
    this.body = make("div", "text");
    this.words = document.createTextNode("");
    this.body.append(this.words);
    this.foot = make("p", "foot");
    this.facts = make("span", "facts", "waiting for the first token");
    this.select = make("button", "link", "Timeline");
    this.select.type = "button";
    this.select.hidden = true;
    this.select.addEventListener("click", () => onSelect(this.id, { focus: true }));
    this.foot.append(this.facts, this.select);
    this.node.append(this.body, this.foot);
    log.append(this.node);
  }

  begin(id) {
    this.id = id;
    this.select.hidden = !id;
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (reasoning) this.think(reasoning);
    if (content) this.say(content);
    for (const call of calls ?? []) this.say(call.function?.name ?? call.function?.arguments ?? "");
  }

  started() {
    if (this.firstMs !== null) return;
    this.firstMs = performance.now() - this.startedMs;
    this.node.classList.remove("waiting");
    this.facts.textContent = `first token after ${milliseconds(this.firstMs)}`;
  }

  say(piece) {
    this.started();
    this.text += piece;
    this.follow(() => this.words.appendData(piece));
  }

  think(piece) {
    this.started();
    if (!this.thoughts) {
      const box = make("details", "thinking");
      this.thoughts = document.createTextNode("");
      const body = make("div", "text");
      body.append(this.thoughts);
      box.append(make("summary", "", "Thinking"), body);
      this.node.prepend(box);
    }
    this.follow(() => this.thoughts.appendData(piece));
  }

  /** Return how far the end is behind the message field, in pixels. */
  hiddenPx() {
    const edge = document.getElementById("composer").getBoundingClientRect().top;
    return this.foot.getBoundingClientRect().bottom - edge;
  }

  /** Change the answer; keep its end in view, unless the person had scrolled away from it. */
  follow(change) {
    const wasNear = this.hiddenPx() < NEAR_PX;
    change();
    const hidden = this.hiddenPx();
    if (wasNear && hidden > 0) window.scrollBy(0, hidden);
  }

  end(finish = null) {
    this.finish = finish ?? this.finish;
    this.node.classList.remove("waiting");
    const facts = [];
    const usage = this.usage;
    if (usage) {
      facts.push(`${usage.completion_tokens} tokens`);
      const details = usage.prompt_tokens_details ?? {};
      facts.push(`${usage.prompt_tokens} in the prompt`);
      if (details.cached_tokens) facts.push(`${details.cached_tokens} of them cached`);
    }
    if (this.firstMs !== null) facts.push(`first after ${milliseconds(this.firstMs)}`);
    facts.push(`${milliseconds(performance.now() - this.startedMs)} in all`);
    if (FINISH[this.finish]) facts.push(FINISH[this.finish]);
    // A fact is not torn apart at the end of a line.
    const shown = facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
    this.follow(() => {
      this.facts.textContent = shown;
    });
    this.node.setAttribute("aria-busy", "false");
    if (!this.text && !this.thoughts) {
      this.node.classList.add("empty");
      this.words.data = finish === "stopped" ? "Stopped before the first word." : "The model said nothing.";
    }
  }
}

export class Conversation {
  /** `onSelect(id)` asks for the timeline of an answer. */
  constructor({ onSelect }) {
    this.log = document.getElementById("log");
    this.welcome = document.getElementById("welcome");
    this.onSelect = onSelect;
  }

  user(text, items) {
    this.welcome.hidden = true;
    const node = make("article", "turn user");
    node.setAttribute("aria-label", "You");
    if (items.length) {
      const media = make("div", "media");
      media.append(...items.map((item) => preview(item, { controls: true })));
      node.append(media);
    }
    if (text) node.append(make("div", "text", text));
    this.log.append(node);
    node.scrollIntoView({ block: "start" });
    return node;
  }

  answer() {
    return new Answer(this.log, this.onSelect);
  }

  error(error) {
    const node = make("article", "turn error");
    node.setAttribute("role", "alert");
    node.append(make("p", "error-title", error.status ? `Error ${error.status}` : "Error"));
    node.append(make("p", "error-message", error.message));
    if (error.param) {
      const where = make("p", "error-param", "in ");
      where.append(make("code", "", error.param));
      node.append(where);
    }
    if (error.status === 401) node.append(make("p", "hint", "Enter a key under Settings."));
    this.log.append(node);
    // After the field has taken its new height.
    requestAnimationFrame(() => node.scrollIntoView({ block: "nearest" }));
    return node;
  }

  clear() {
    this.log.replaceChildren(this.welcome);
    this.welcome.hidden = false;
  }
}

export { milliseconds };
