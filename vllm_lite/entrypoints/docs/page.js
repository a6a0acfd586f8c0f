// The panel: sends what the form says, shows the answer as it streams. What a protocol needs is in PROTOCOLS alone.

const element = (id) => document.getElementById(id);
const panel = element("panel");
const base = new URL(".", location.href).href.replace(/\/$/, ""); // of this page, also behind a proxy's path

/** Text between delimiters, as it arrives. Throws where the stream ends within a message. */
async function* pieces(body, delimiter) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + decoder.decode(value, { stream: true })).split(delimiter);
    rest = parts.pop();
    yield* parts;
  }
  if (rest.trim()) throw new Error("The connection ended in the middle of a message.");
}

/** The data of each server-sent event. */
async function* sseData(body) {
  for await (const event of pieces(body, /\r?\n\r?\n/)) {
    const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
    if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
  }
}

/** A value of the form: JSON where it is JSON, else text, so that the server names what is wrong with it. */
function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** What the box for more fields holds: not what has a field of its own or is set. Throws an error that can be shown. */
function moreFields(own) {
  const text = element("more").value;
  if (!text.trim()) return {};
  let fields;
  try {
    fields = JSON.parse(text);
  } catch (error) {
    throw new Error(`More fields: this is no JSON: ${error.message}`);
  }
  if (fields === null || typeof fields !== "object" || Array.isArray(fields)) {
    throw new Error('More fields: this must be an object like {"top_p": 0.9}.');
  }
  const name = [...own, ...panel.dataset.sets.split(" ")].find((one) => one in fields);
  if (name) throw new Error(`More fields: leave out ${name}, which the panel sets itself.`);
  return fields;
}

/** The fields of one line that are filled in. */
function givenFields(ids) {
  const given = ids.map((id) => [id, element(id).value.trim()]).filter(([, text]) => text);
  return Object.fromEntries(given.map(([id, text]) => [id, valueOf(text)]));
}

// For each kind of panel: the route, the body of a request, and the events of an answer, each
// { texts, isWhole, numTokens, reasons }: new text of each candidate (or all of it), tokens so far, why it ended.
const PROTOCOLS = {
  native: {
    path: "/generate",
    body() {
      const own = ["prompt", "max_tokens", "temperature"];
      const more = moreFields(own);
      const isWhole = Boolean(more.use_beam_search) || (more.best_of ?? 0) > (more.n ?? 1); // no new text alone then
      const fields = { prompt: element("prompt").value, ...givenFields(own.slice(1)), ...more };
      return { ...fields, stream: true, details: true, stream_deltas: !isWhole };
    },
    async *events(response, body) {
      const delimiter = panel.dataset.delimiter === "newline" ? "\n" : "\0";
      for await (const piece of pieces(response.body, delimiter)) {
        const message = JSON.parse(piece);
        const reasons = message.finish_reason.map((reason, index) => {
          const what = message.stop_reason[index];
          return reason && what !== null ? `${reason} (${JSON.stringify(what)})` : reason;
        });
        yield {
          texts: body.stream_deltas ? message.text : message.text.map((text) => text.slice(body.prompt.length)),
          isWhole: !body.stream_deltas,
          numTokens: message.num_generated_tokens,
          reasons,
        };
      }
    },
  },

  openai: {
    path: "/v1/chat/completions",
    body() {
      const own = ["messages", "max_tokens", "temperature"];
      const more = moreFields(own);
      const messages = ["system", "user"].map((role) => ({ role, content: element(role).value }));
      return {
        model: panel.dataset.model,
        messages: messages.filter(({ role, content }) => role === "user" || content),
        ...givenFields(own.slice(1)),
        ...more,
        stream: true,
        stream_options: { include_usage: true },
      };
    },
    async *events(response, body) {
      const reasons = Array(body.n ?? 1).fill(null);
      let numTokens = 0;
      for await (const data of sseData(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const texts = reasons.map(() => "");
        for (const { index, delta, finish_reason } of chunk.choices) {
          texts[index] = delta.content ?? "";
          reasons[index] = finish_reason ?? reasons[index];
          if (texts[index]) numTokens += 1; // as good as known before the usage comes, at the end
        }
        numTokens = chunk.usage?.completion_tokens ?? numTokens;
        yield { texts, isWhole: false, numTokens, reasons };
      }
    },
  },
};
const protocol = PROTOCOLS[panel.dataset.kind];

/** The texts of the candidates, one below the other. */
class Output {
  constructor(box) {
    this.box = box;
    this.texts = [];
    box.replaceChildren();
  }

  show(texts, isWhole) {
    texts.forEach((text, index) => {
      if (index === this.texts.length) this.texts.push(this.add());
      if (isWhole) this.texts[index].data = text;
      else this.texts[index].appendData(text);
    });
  }

  add() {
    const block = document.createElement("div");
    block.className = "candidate";
    const text = document.createTextNode("");
    block.append(text);
    this.box.append(block);
    return text;
  }
}

/** Times and counts of one answer. Times are in milliseconds. */
class Figures {
  constructor() {
    this.start = performance.now();
    for (const id of ["reason", "tokens", "rate", "first"]) element(id).textContent = "–";
  }

  add({ numTokens, reasons }) {
    const now = performance.now();
    if (this.firstAt === undefined && numTokens > 0) {
      [this.firstAt, this.numFirst] = [now, numTokens];
      element("first").textContent = duration(now - this.start);
    }
    element("tokens").textContent = String(numTokens);
    if (numTokens > this.numFirst && now > this.firstAt) {
      element("rate").textContent = (((numTokens - this.numFirst) * 1000) / (now - this.firstAt)).toFixed(1);
    }
    this.isDone = reasons.length > 0 && reasons.every(Boolean);
    if (this.isDone) this.end([...new Set(reasons)].join(", "));
  }

  end(reason) {
    element("reason").textContent = reason;
  }
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** What an answer that is none says: `detail`, or OpenAI's `error`. */
async function failure(response) {
  const text = await response.text();
  const value = valueOf(text);
  const detail = value?.detail ?? value?.error?.message ?? text;
  return new Error(`${response.status}: ${typeof detail === "string" ? detail : JSON.stringify(detail)}`);
}

let running = null;

async function send() {
  if (running) return;
  element("error").textContent = "";
  const aborter = new AbortController();
  let figures;
  try {
    const body = protocol.body();
    setRunning(aborter);
    const output = new Output(element("output"));
    figures = new Figures();
    const headers = { "Content-Type": "application/json" };
    const key = element("key")?.value.trim();
    if (key) headers.Authorization = `Bearer ${key}`;
    const request = { method: "POST", headers, body: JSON.stringify(body), signal: aborter.signal };
    const response = await fetch(base + protocol.path, request);
    if (!response.ok) throw await failure(response);
    for await (const event of protocol.events(response, body)) {
      output.show(event.texts, event.isWhole);
      figures.add(event);
    }
    if (!figures.isDone) throw new Error("The connection ended before the answer was complete.");
  } catch (error) {
    if (aborter.signal.aborted) figures.end("stopped by you");
    else showError(error);
  } finally {
    setRunning(null);
  }
}

function showError(error) {
  const isNetwork = error instanceof TypeError; // what fetch and its reader throw, with words of the browser's own
  element("error").textContent = isNetwork ? `The connection failed: ${error.message}.` : error.message;
}

/** A disabled button cannot have the focus, which goes to the other one. */
function setRunning(aborter) {
  running = aborter;
  const [off, on] = aborter ? ["send", "stop"] : ["stop", "send"];
  const hadFocus = document.activeElement === element(off);
  element(off).disabled = true;
  element(on).disabled = false;
  if (hadFocus) element(on).focus();
  element("output").setAttribute("aria-busy", String(Boolean(aborter)));
}

panel.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
panel.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
element("stop").addEventListener("click", () => running?.abort());
addEventListener("pagehide", () => running?.abort()); // browsers keep pages, and what they wait for, to go back to

// Snippets: the URL that this browser uses, and a button to copy each.

for (const place of document.querySelectorAll("[data-origin]")) place.textContent = base;

/** Outside of HTTPS and localhost browsers have no clipboard for pages; a selection works everywhere. */
async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    // There is none, or it is not allowed.
  }
  getSelection().selectAllChildren(code);
  return document.execCommand("copy");
}

for (const snippet of document.querySelectorAll(".snippet")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${snippet.querySelector("figcaption").textContent}`);
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.className = "unseen";
  button.addEventListener("click", async () => {
    const isCopied = await copy(snippet.querySelector("code"));
    button.textContent = isCopied ? "Copied" : "Failed";
    status.textContent = isCopied ? "Copied." : "Copying failed.";
    setTimeout(() => {
      button.textContent = "Copy";
      status.textContent = "";
    }, 2000);
  });
  snippet.append(button, status);
}
