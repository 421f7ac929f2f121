// The chat of `chat_page.html`: one conversation, streamed from the server's own API. Texts are never read as markup.
"use strict";
const at = (id) => document.getElementById(id);
const settings = JSON.parse(at("data").textContent);
let messages = [], running = null;

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function report(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

async function failure(reply) {
  const body = await reply.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${reply.status}.`;
}

async function loadModels() {
  const reply = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (!reply?.ok) return report(reply ? await failure(reply) : "The server does not answer.");
  const names = (await reply.json()).data.map((model) => model.id);
  at("model").replaceChildren(...names.map((name) => new Option(name, name)));
  report("");
}

function turn(role) {
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  box.append(document.createElement("span"));
  at("log").append(box);
  return box;
}

function show(box, message) {
  const log = at("log"), below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  if (message.reasoning_content) {
    let thought = box.querySelector("details");
    if (!thought) {
      thought = document.createElement("details");
      thought.append(document.createElement("summary"), document.createElement("span"));
      thought.firstChild.textContent = "Reasoning";
      box.prepend(thought);
    }
    thought.lastChild.textContent = message.reasoning_content;
  }
  box.lastChild.textContent = message.content;
  if (below) log.scrollTop = log.scrollHeight;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function answer(box, message) {
  const body = JSON.stringify({ model: at("model").value || undefined, messages, stream: true });
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body, signal: running.signal,
  });
  if (!reply.ok) throw new Error(await failure(reply));
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta ?? {};
    for (const field of ["content", "reasoning_content"]) message[field] += delta[field] ?? "";
    show(box, message);
  }
}

async function send() {
  const text = at("text").value.trim();
  if (!text || running) return;
  report("");
  messages.push({ role: "user", content: text });
  const asked = turn("user"), box = turn("assistant"), message = { role: "assistant", content: "", reasoning_content: "" };
  show(asked, messages.at(-1));
  at("text").value = "";
  running = new AbortController();
  at("send").disabled = !(at("stop").disabled = false);
  try {
    await answer(box, message);
  } catch (error) {
    if (error.name !== "AbortError") report(error.message);
  }
  running = null;
  at("send").disabled = !(at("stop").disabled = true);
  if (message.content || message.reasoning_content) {
    messages.push({ role: "assistant", content: message.content });
  } else { // nothing was answered: the question can be changed and sent again
    messages.pop();
    box.remove();
    asked.remove();
    at("text").value ||= text;
  }
  at("text").focus();
}

at("send").addEventListener("click", send);
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("log").replaceChildren();
  report("");
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
if (settings.needsKey) {
  at("key").hidden = false;
  at("key").value = sessionStorage.getItem("key") ?? "";
  at("key").addEventListener("change", () => {
    sessionStorage.setItem("key", at("key").value.trim());
    loadModels();
  });
}
if (!settings.needsKey || at("key").value) loadModels();
at("text").focus();
