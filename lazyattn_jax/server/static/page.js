"use strict";

const SYSTEM = "You answer questions using the documents.";
const EXAMPLES = [
  ["Harbour of Velmora", "Velmora is a fishing port on the northern coast. Its harbour was built in 1874 by the " +
    "engineer Ada Lindqvist, who had the breakwater made of red granite."],
  ["Orsin bread", "Orsin bread is a dark loaf of rye flour, buttermilk and roasted barley. It is baked in ovens " +
    "heated with heather."],
  ["The glass frog Lumo", "The glass frog Lumo lives in the cloud forests of the Sarita mountains. It calls only " +
    "on nights with fog."],
];
const POLL_MS = 500;
const MAX_TOKENS = 256;

const $ = (id) => document.getElementById(id);
let documents = []; // {title, text, on}
let history = []; // messages of the conversation
let lastAnswer = new Map(); // title -> "reused", "computed", or tokens of both
let running = null; // the AbortController of the answer under way

function make(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

function hue(name) {
  let sum = 0;
  for (const c of name) sum = (sum * 31 + c.codePointAt(0)) % 360;
  return sum;
}

function coloured(element, name) {
  element.style.setProperty("--hue", hue(name));
  return element;
}

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) $("key-label").hidden = false;
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

// Documents ---------------------------------------------------------------------------------------

function showDocuments() {
  $("list").replaceChildren(...documents.map((d, i) => {
    const box = make("input", { type: "checkbox", checked: d.on });
    box.onchange = () => { d.on = box.checked; };
    const up = make("button", { type: "button", textContent: "↑", title: "earlier", disabled: i === 0 });
    up.onclick = () => { documents.splice(i - 1, 2, d, documents[i - 1]); showDocuments(); };
    const remove = make("button", { type: "button", textContent: "×", title: "remove" });
    remove.onclick = () => { documents.splice(i, 1); showDocuments(); };
    const label = make("label", { title: d.text }, box, " ", coloured(make("span", { className: "swatch document" }), d.title), d.title);
    return make("li", {}, label, up, remove);
  }));
}

function addDocument(title, text) {
  documents = documents.filter((d) => d.title !== title);
  documents.push({ title, text, on: true });
  showDocuments();
}

$("add").onsubmit = (event) => {
  event.preventDefault();
  addDocument($("title").value.trim(), $("text").value);
  $("add").reset();
};
$("examples").onclick = () => EXAMPLES.forEach(([title, text]) => addDocument(title, text));
$("shuffle").onclick = () => {
  for (let i = documents.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [documents[i], documents[j]] = [documents[j], documents[i]];
  }
  showDocuments();
};

// Chat --------------------------------------------------------------------------------------------

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask(question) {
  const given = documents.filter((d) => d.on);
  const messages = [{ role: "system", content: SYSTEM }, ...history, { role: "user", content: question }];
  const reply = make("p", { className: "answer" });
  const note = make("p", { className: "note", textContent: "waiting for the first token" });
  $("turns").append(make("div", { className: "turn" }, make("p", { className: "question", textContent: question }), reply, note));
  const begin = performance.now();
  let first = null;
  let usage = null;
  running = new AbortController();
  busy(true);
  try {
    const answer = await call("/v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      body: JSON.stringify({
        messages, documents: given.map(({ title, text }) => ({ title, text })),
        temperature: 0, max_tokens: MAX_TOKENS, stream: true, stream_options: { include_usage: true },
      }),
    });
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const text = event.choices[0]?.delta.content;
      if (text) {
        first ??= performance.now() - begin;
        reply.append(text);
        note.textContent = `first token after ${first.toFixed(0)} ms`;
        note.scrollIntoView({ block: "nearest" });
      }
      usage = event.usage ?? usage;
    }
    history.push({ role: "user", content: question }, { role: "assistant", content: reply.textContent });
    if (usage) showReuse(note, usage, given, first);
  } catch (error) {
    const stopped = error.name === "AbortError";
    note.append(stopped ? ", stopped" : `: ${error.message}`);
    note.classList.toggle("failed", !stopped);
  } finally {
    running = null;
    busy(false);
  }
}

function showReuse(note, usage, given, first) {
  const details = usage.prompt_tokens_details;
  const time = first === null ? "no text" : `first token after ${first.toFixed(0)} ms`;
  note.textContent = `${time}, ${details.cached_tokens} of ${usage.prompt_tokens} prompt tokens reused`;
  lastAnswer = new Map((details.documents ?? []).map((d, i) =>
    [given[i].title, d.cached_tokens === d.tokens ? "reused" : "computed"]));
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  if (running) return;
  const question = $("question").value;
  $("question").value = "";
  ask(question);
};
$("stop").onclick = () => running?.abort();
$("clear").onclick = () => {
  running?.abort();
  history = [];
  $("turns").replaceChildren();
};

// Pool --------------------------------------------------------------------------------------------

function size(bytes) {
  for (const [unit, of] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= of) return `${(bytes / of).toFixed(1)} ${unit}`;
  }
  return `${bytes} B`;
}

function ago(seconds) {
  if (seconds === null) return "never";
  const passed = Math.max(0, Math.round(Date.now() / 1000 - seconds));
  return passed < 120 ? `${passed} s ago` : `${Math.round(passed / 60)} min ago`;
}

function part(className, pages, title) {
  const element = make("span", { className, title: `${title}: ${pages} pages` });
  element.style.flex = `${pages} 0 0`;
  return element;
}

function showPool(pool) {
  const { pages } = pool;
  const of = (count) => `${count} ${count === 1 ? "page" : "pages"}, ${size(count * pool.page_bytes)}`;
  $("load").textContent = `${of(pages.total)}; ${of(pages.free)} free; ` +
    `requests: ${pool.running} running, ${pool.waiting} waiting`;
  const kinds = [
    ["text", pages.text, "text before and between documents, and answers"],
    ["private", pages.private, "being computed"],
    ["other", pages.other_documents, "documents of others"],
    ["free", pages.free, "free"],
  ];
  $("bar").replaceChildren(
    ...pool.documents.map((d) => coloured(part(d.users.length ? "document used" : "document", d.pages, d.name), d.name)),
    ...kinds.filter(([, count]) => count).map(([kind, count, title]) => part(kind, count, title)));
  $("legend").replaceChildren(...kinds.map(([kind, , title]) =>
    make("li", {}, make("span", { className: `swatch ${kind}` }), title)));
  $("resident").replaceChildren(...pool.documents.map((d) => {
    const name = make("td", {}, coloured(make("span", { className: "swatch document" }), d.name), d.name, d.pinned ? " (pinned)" : "");
    const answer = lastAnswer.get(d.name) ?? "";
    const cells = [d.tokens, size(d.pages * pool.page_bytes), d.users.length || "", d.hits, ago(d.last_used_at)];
    const row = make("tr", {}, name, ...cells.map((text) => make("td", { textContent: text })),
      make("td", { textContent: answer, className: answer }));
    row.cells[3].title = d.users.join("\n");
    return row;
  }));
  $("nothing").hidden = pool.documents.length > 0;
}

async function poll() {
  try {
    if (!document.hidden) {
      showPool(await (await call("/v1/pool")).json());
      if (!$("model").textContent) {
        const model = (await (await call("/v1/models")).json()).data[0];
        $("model").textContent = `${model.id}, context of ${model.max_model_len} tokens`;
      }
      $("problem").textContent = "";
    }
  } catch (error) {
    $("problem").textContent = error.message;
  }
  setTimeout(poll, POLL_MS);
}

showDocuments();
poll();
