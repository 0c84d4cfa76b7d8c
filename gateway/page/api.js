// The gateway's API as this page uses it: the streamed chat, traces, the fleet.
// Addresses are relative, so that the page also works behind a proxy with a path of its own.

const KEY = "transom-api-key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, id = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.id = id;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not JSON: something between us and the gateway has answered.
  }
  const message = detail.message ?? `The server answered ${response.status}.`;
  return new ApiError(message, {
    status: response.status,
    code: detail.code,
    param: detail.param,
    id: response.headers.get("X-Request-Id"),
  });
}

export async function getJson(path) {
  return (await call(path)).json();
}

export function trace(id) {
  return getJson(`v1/requests/${encodeURIComponent(id)}/trace`);
}

export function fleet() {
  return getJson("v1/fleet");
}

/** Send a chat; `onStart` gets the request's id, `onEvent` each chunk. Resolves at the stream's end. */
export async function chat(body, { signal, onStart, onEvent }) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  onStart(response.headers.get("X-Request-Id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer broke off before its end.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error);
      onEvent(event);
    }
  }
}
