// The message field: text, attached files by picking, dropping or pasting, and the keys.

const KINDS = ["image", "video", "audio"];
const BY_NAME = {
  png: "image", jpg: "image", jpeg: "image", webp: "image", gif: "image", bmp: "image", avif: "image",
  mp4: "video", m4v: "video", mov: "video", webm: "video", mkv: "video", avi: "video",
  wav: "audio", mp3: "audio", flac: "audio", ogg: "audio", opus: "audio", m4a: "audio", aac: "audio",
};
const WORDS = { image: "Picture", video: "Video", audio: "Sound" };

export function kindOf(file) {
  const kind = file.type.split("/")[0];
  if (KINDS.includes(kind)) return kind;
  return BY_NAME[file.name.split(".").pop().toLowerCase()] ?? null;
}

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1e6) return `${Math.round(bytes / 1000)} kB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

export function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Return an element that shows an attached file. */
export function preview(item, { controls = false } = {}) {
  if (item.kind === "image") {
    const image = make("img");
    image.src = item.preview;
    image.alt = item.file.name || "pasted picture";
    return image;
  }
  const player = make(item.kind);
  player.src = item.preview;
  player.preload = "metadata";
  player.controls = controls;
  player.muted = !controls;
  if (!controls) player.tabIndex = -1;
  player.setAttribute("aria-label", item.file.name);
  return player;
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} can't be read.`));
    reader.readAsDataURL(file);
  });
}

/** Return the content of a user message in the API's form. */
export async function contentOf(text, items) {
  if (!items.length) return text;
  const parts = await Promise.all(
    items.map(async ({ file, kind }) => ({
      type: `${kind}_url`,
      [`${kind}_url`]: { url: await asDataUrl(file) },
    })),
  );
  return text ? [...parts, { type: "text", text }] : parts;
}

export class Composer {
  /** `onSend(text, items)`, `onStop()`, `onRefuse(message)`. */
  constructor({ onSend, onStop, onRefuse }) {
    this.form = document.getElementById("composer");
    this.field = document.getElementById("prompt");
    this.list = document.getElementById("attachments");
    this.picker = document.getElementById("files");
    this.sendButton = document.getElementById("send");
    this.stopButton = document.getElementById("stop");
    this.items = [];
    this.busy = false;
    this.onSend = onSend;
    this.onStop = onStop;
    this.onRefuse = onRefuse;
    this.listen();
    // What is scrolled into view must not end up behind the field, which floats above the page's end.
    new ResizeObserver(() => {
      document.documentElement.style.scrollPaddingBottom = `${this.form.offsetHeight + 16}px`;
    }).observe(this.form);
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.field.addEventListener("input", () => this.grow());
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy) this.onStop();
    });
    this.stopButton.addEventListener("click", () => this.onStop());
    this.picker.addEventListener("change", () => {
      this.attach(this.picker.files);
      this.picker.value = "";
      this.field.focus();
    });
    document.addEventListener("paste", (event) => {
      if (event.clipboardData?.files.length) {
        event.preventDefault();
        this.attach(event.clipboardData.files);
      }
    });
    this.listenForDrops();
  }

  listenForDrops() {
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      document.body.classList.add("dragging");
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) document.body.classList.remove("dragging");
    });
    document.addEventListener("drop", (event) => {
      document.body.classList.remove("dragging");
      if (!carriesFiles(event)) return;
      event.preventDefault();
      this.attach(event.dataTransfer.files);
      this.field.focus();
    });
  }

  attach(files) {
    for (const file of files) {
      const kind = kindOf(file);
      if (kind) this.items.push({ file, kind, preview: URL.createObjectURL(file) });
      else this.onRefuse(`${file.name} is neither a picture nor a video nor a sound.`);
    }
    this.draw();
  }

  draw() {
    this.list.replaceChildren(
      ...this.items.map((item) => {
        const row = make("li", `attachment ${item.kind}`);
        if (item.kind !== "audio") row.append(preview(item));
        const label = make("span", "attachment-name", item.file.name || WORDS[item.kind]);
        label.append(make("small", "", `${WORDS[item.kind]}, ${size(item.file.size)}`));
        const remove = make("button", "remove", "Remove");
        remove.type = "button";
        remove.setAttribute("aria-label", `Remove ${item.file.name}`);
        remove.addEventListener("click", () => {
          this.items = this.items.filter((other) => other !== item);
          URL.revokeObjectURL(item.preview);
          this.draw();
          this.field.focus();
        });
        row.append(label, remove);
        return row;
      }),
    );
    this.list.hidden = !this.items.length;
  }

  grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 240)}px`;
  }

  submit() {
    const text = this.field.value.trim();
    if (this.busy || (!text && !this.items.length)) return;
    const items = this.items;
    this.fill("", []);
    this.onSend(text, items);
  }

  fill(text, items) {
    this.field.value = text;
    this.items = items;
    this.grow();
    this.draw();
  }

  setBusy(busy) {
    const hadFocus = document.activeElement;
    this.busy = busy;
    this.sendButton.hidden = busy;
    this.stopButton.hidden = !busy;
    if (hadFocus === this.sendButton && busy) this.stopButton.focus();
    if (hadFocus === this.stopButton && !busy) this.field.focus();
  }
}
