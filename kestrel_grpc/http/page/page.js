// The page behind GET /: an image, a skill, the answer as it is written, and the same request as code.
"use strict";

const $ = (id) => document.getElementById(id);
const COLOURS = ["#e6194b", "#1f6feb", "#2da44e", "#d4820a", "#8250df", "#0d9aa8", "#c2255c", "#6b7d0c"];
const SVG = "http://www.w3.org/2000/svg";
const PLACEHOLDERS = {
  query: "What is in this image?",
  chat: "Ask, then ask again",
  detect: "cat, dog, person",
  point: "door handle",
  segment: "the red car",
};

const KNOWS = {
  "kestrel-small": "It reads receipts, charts and screens, names icons and counts. It does not know photographs of people or places.",
};

const state = { skill: "query", image: null, turns: [], running: null, code: "curl", camera: null };

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const body = await response.json();
    $("model").textContent = response.ok
      ? `serves ${body.data.map((model) => model.id).join(", ")}. ${body.data.map((model) => KNOWS[model.id] || "").join("")}`
      : body.error.message;
  } catch {
    $("model").textContent = "the server does not answer";
  }
}

// The image.

async function useFile(file) {
  if (!file) return;
  stopCamera();
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  useImage(url);
}

function useImage(url) {
  $("asks").replaceChildren();
  state.image = url;
  state.turns = [];
  $("image").src = url;
  $("frame").hidden = false;
  $("hint").hidden = true;
  $("clear").hidden = false;
  $("drop").classList.add("full");
  clearAnswer();
  showCode();
}

async function showSamples() {
  const response = await fetch("page/samples.json");
  for (const sample of response.ok ? await response.json() : []) {
    const button = document.createElement("button");
    const picture = document.createElement("img");
    button.type = "button";
    button.dataset.sample = sample.name;
    picture.src = `page/${sample.file}`;
    picture.alt = `Sample: ${sample.name}`;
    button.append(picture);
    button.addEventListener("click", () => useSample(sample));
    $("samples").append(button);
  }
}

async function useSample(sample) {
  const response = await fetch(`page/${sample.file}`);
  if (!response.ok) return showError("The server has no such picture.");
  await useFile(await response.blob());
  $("asks").replaceChildren(...sample.asks.map((ask) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = ask.skill === "query" ? ask.text : `${ask.skill}: ${ask.text}`;
    button.addEventListener("click", () => fill(ask));
    return button;
  }));
  fill(sample.asks[0]);
}

function fill(ask) {
  choose(ask.skill);
  $("text").value = ask.text;
  showCode();
}

function removeImage() {
  $("asks").replaceChildren();
  state.image = null;
  state.turns = [];
  $("image").removeAttribute("src");
  $("frame").hidden = true;
  $("hint").hidden = false;
  $("clear").hidden = true;
  $("drop").classList.remove("full");
  clearAnswer();
  showCode();
}

async function startCamera() {
  try {
    state.camera = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    showError("The camera can't be used: browsers allow it on https and on localhost only, if you agree.");
    return;
  }
  removeImage();
  $("hint").hidden = true;
  $("video").hidden = false;
  $("video").srcObject = state.camera;
  await $("video").play();
  $("shoot").hidden = false;
}

function stopCamera() {
  for (const track of state.camera ? state.camera.getTracks() : []) track.stop();
  state.camera = null;
  $("video").hidden = true;
  $("shoot").hidden = true;
  if (!state.image) $("hint").hidden = false;
}

function shoot() {
  const video = $("video");
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  stopCamera();
  useImage(canvas.toDataURL("image/jpeg", 0.92));
}

// The request.

function hasText(skill) {
  return skill !== "caption" && skill !== "gaze";
}

function choose(skill) {
  state.skill = skill;
  for (const tab of document.querySelectorAll("[data-skill]")) {
    const chosen = tab.dataset.skill === skill;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) $("form").setAttribute("aria-labelledby", tab.id);
  }
  const asks = skill === "query" || skill === "chat";
  $("text-label").textContent = asks ? "Question" : skill === "segment" ? "Object" : "Objects, with commas between";
  $("text-label").hidden = $("text").hidden = !hasText(skill);
  $("text").placeholder = PLACEHOLDERS[skill] || "";
  $("length-label").hidden = skill !== "caption";
  $("reasoning-label").hidden = !asks;
  $("end-label").hidden = !asks && skill !== "caption";
  state.turns = [];
  clearAnswer();
  showCode();
}

// One request for each object of a list.
function requests() {
  const text = $("text").value.trim();
  const image = state.image ? { image_url: state.image } : {};
  const end = $("end").value;
  const settings = end ? { settings: { stop: [end] } } : {};
  switch (state.skill) {
    case "caption":
      return [{ path: "caption", body: { ...image, length: $("length").value, ...settings, stream: true } }];
    case "query":
      return [{ path: "query", body: { ...image, question: text, reasoning: $("reasoning").checked, ...settings, stream: true } }];
    case "chat": {
      const parts = (question, first) =>
        first && state.image
          ? [{ type: "image_url", image_url: { url: state.image } }, { type: "text", text: question }]
          : question;
      const messages = [];
      for (const [index, turn] of [...state.turns, { question: text }].entries()) {
        messages.push({ role: "user", content: parts(turn.question, index === 0) });
        if (turn.answer !== undefined) messages.push({ role: "assistant", content: turn.answer });
      }
      const stop = end ? { stop: [end] } : {};
      const body = { messages, reasoning: $("reasoning").checked, ...stop, stream: true, stream_options: { include_usage: true } };
      return [{ path: "chat/completions", body }];
    }
    case "segment":
      return [{ path: "segment", body: { ...image, object: text, stream: true }, label: text }];
    case "gaze":
      return [{ path: "gaze", body: { ...image } }];
    default: {
      const objects = text.split(",").map((object) => object.trim()).filter(Boolean);
      return objects.map((object) => ({ path: state.skill, body: { ...image, object }, label: object }));
    }
  }
}

async function run(event) {
  event.preventDefault();
  if (state.running) return;
  const needsImage = !["query", "chat"].includes(state.skill);
  if (needsImage && !state.image) return showError("Choose an image first.");
  if (hasText(state.skill) && !$("text").value.trim()) return showError(`Write the ${state.skill === "query" || state.skill === "chat" ? "question" : "object"} first.`);
  clearAnswer(state.skill === "chat");
  const control = new AbortController();
  state.running = control;
  $("run").disabled = true;
  $("stop").hidden = false;
  const began = performance.now();
  try {
    const all = requests();
    await Promise.all(all.map((request, index) => send(request, index, began, control.signal)));
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
  } finally {
    state.running = null;
    $("run").disabled = false;
    $("stop").hidden = true;
  }
}

async function send(request, index, began, signal) {
  const response = await fetch(`v1/${request.path}`, {
    method: "POST", headers: headers(), body: JSON.stringify(request.body), signal,
  });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error ? body.error.message : `The server answered with status ${response.status}.`);
  }
  const show = { query: showText, caption: showText, chat: showChat, segment: showSegment }[state.skill];
  if (state.skill === "gaze") return showGazes(await response.json(), began);
  if (!show) return showFound(await response.json(), request.label, index, began);
  const view = show(request, index, began);
  for await (const message of events(response)) {
    if (message.error) throw new Error(message.error.message);
    view(message);
  }
}

// Server-sent events, one JSON object each.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// The answer.

function entry(kind, text = "") {
  const element = document.createElement("p");
  element.className = kind;
  element.textContent = text;
  $("log").append(element);
  return element;
}

function showText(request, index, began) {
  let thought = null;
  let answer = null;
  return (message) => {
    if (message.reasoning_chunk) (thought ||= entry("thought")).textContent += message.reasoning_chunk;
    if (message.chunk) (answer ||= entry("answer")).textContent += message.chunk;
    if (message.completed) {
      if (!answer) entry("answer", "(an empty answer)");
      showFacts(message.metrics, began);
      const points = message.reasoning ? message.reasoning.grounding.flatMap((span) => span.points) : [];
      for (const [x, y] of points) paintPoint({ x, y }, COLOURS[0]);
    }
  };
}

function showChat(request, index, began) {
  const turn = { question: $("text").value.trim(), answer: "" };
  entry("asked", turn.question);
  const answer = entry("answer");
  let thought = null;
  $("text").value = "";
  return (message) => {
    const choice = message.choices[0];
    if (choice && choice.delta.reasoning_content) {
      if (!thought) {
        thought = entry("thought");
        answer.before(thought);
      }
      thought.textContent += choice.delta.reasoning_content;
    }
    if (choice && choice.delta.content) answer.textContent = turn.answer += choice.delta.content;
    if (message.usage) {
      state.turns.push(turn);
      const used = message.usage;
      showFacts({ input_tokens: used.prompt_tokens, output_tokens: used.completion_tokens }, began);
      showCode();
    }
  };
}

function showSegment(request, index, began) {
  let path = "";
  let box = null;
  const outline = document.createElementNS(SVG, "path");
  outline.setAttribute("fill", COLOURS[0]);
  outline.setAttribute("fill-opacity", "0.35");
  outline.setAttribute("stroke", COLOURS[0]);
  outline.setAttribute("stroke-width", "3");
  $("marks").append(outline);
  const draw = () => {
    if (!box) return;
    outline.setAttribute("d", path);
    const width = box.x_max - box.x_min;
    const height = box.y_max - box.y_min;
    outline.setAttribute("transform", `translate(${box.x_min} ${box.y_min}) scale(${width} ${height})`);
  };
  $("marks").setAttribute("viewBox", "0 0 1 1");
  return (message) => {
    if (message.type === "bbox") box = message.bbox;
    if (message.type === "path_delta") path += message.chunk;
    if (message.type === "final") {
      path = message.path;
      box = message.bbox || box;
      if (path && box) paintLabel(box.x_min, box.y_min, COLOURS[0], request.label, message.score);
      legend(request.label, path ? [message.score] : [], COLOURS[0], 0);
      showFacts(message.metrics, began);
    }
    draw();
  };
}

function showFound(body, label, index, began) {
  const colour = COLOURS[index % COLOURS.length];
  for (const box of body.objects || []) paintBox(box, colour, label);
  for (const point of body.points || []) {
    paintPoint(point, colour);
    paintLabel(point.x, point.y, colour, "", point.score);
  }
  legend(label, (body.objects || body.points).map((each) => each.score), colour, index, body.absence);
  showFacts(body.metrics, began);
}

// The gaze of every face: a line from the face to what the person looks at.
function showGazes(body, began) {
  for (const [index, each] of body.gazes.entries()) {
    const colour = COLOURS[index % COLOURS.length];
    const label = each.gaze ? "" : "looks out of the image";
    paintBox({ ...each.face, score: undefined }, colour, label);
    if (!each.gaze) continue;
    mark("line", { x1: each.eye.x, y1: each.eye.y, x2: each.gaze.x, y2: each.gaze.y, stroke: colour, "stroke-width": 3 });
    paintPoint(each.gaze, colour);
    paintLabel(each.gaze.x, each.gaze.y, colour, "", each.gaze.score);
  }
  legend("face", body.gazes.map((each) => each.gaze && each.gaze.score || undefined), COLOURS[0], 0, body.face_absence);
  showFacts(body.metrics, began);
}

function mark(name, attributes) {
  $("marks").setAttribute("viewBox", "0 0 1 1");
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  $("marks").append(element);
  return element;
}

function paintBox(box, colour, label) {
  const shape = { x: box.x_min, y: box.y_min, width: box.x_max - box.x_min, height: box.y_max - box.y_min };
  mark("rect", { ...shape, fill: colour, "fill-opacity": 0.12, stroke: colour, "stroke-width": 3 });
  paintLabel(box.x_min, box.y_min, colour, label, box.score);
}

// Text in HTML, because the view box of the marks is stretched to the image.
function paintLabel(x, y, colour, label, score) {
  const element = document.createElement("span");
  element.textContent = [label, score === undefined ? "" : score.toFixed(2)].filter(Boolean).join(" ");
  element.style.left = `${100 * x}%`;
  element.style.top = `${100 * y}%`;
  element.style.background = colour;
  if (!element.textContent) return;
  $("labels").append(element);
  const over = element.offsetLeft + element.offsetWidth - $("labels").clientWidth;
  if (over > 0) element.style.marginLeft = `${-over}px`;
}

function paintPoint(point, colour) {
  // The view box is square and the image may not be: an ellipse that looks round on the image.
  const { naturalWidth: width, naturalHeight: height } = $("image");
  const radius = 0.012 * Math.max(width, height);
  mark("ellipse", {
    cx: point.x, cy: point.y, rx: radius / width, ry: radius / height,
    fill: colour, stroke: "#fff", "stroke-width": 2,
  });
}

// ``scores``: of the objects, undefined where there is none.
function legend(label, scores, colour, index, absence) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.style.background = colour;
  const known = scores.filter((score) => score !== undefined).map((score) => score.toFixed(2));
  let detail = known.length ? ` (score ${known.join(", ")})` : "";
  if (!scores.length && absence !== undefined) detail = ` (absent with probability ${absence.toFixed(2)})`;
  item.append(swatch, `${label}: ${scores.length}${detail}`);
  item.dataset.index = index;
  const later = [...$("legend").children].find((each) => Number(each.dataset.index) > index);
  $("legend").insertBefore(item, later || null);
}

function showFacts(metrics, began) {
  const parts = [`${Math.round(performance.now() - began)} ms`];
  if (metrics.ttft_ms !== undefined) parts.push(`first token after ${Math.round(metrics.ttft_ms)} ms on the server`);
  parts.push(`${metrics.input_tokens} tokens in, ${metrics.output_tokens} out`);
  $("facts").textContent = parts.join(" · ");
}

function showError(text) {
  $("error").textContent = text;
}

function clearAnswer(keepLog = false) {
  showError("");
  $("facts").textContent = "";
  $("legend").replaceChildren();
  $("marks").replaceChildren();
  $("labels").replaceChildren();
  if (!keepLog) $("log").replaceChildren();
}

// The same request as code.

function shortened(value) {
  return JSON.stringify(value, (key, each) => (typeof each === "string" && each.startsWith("data:") ? "data:image/jpeg;base64,…" : each), 2);
}

function showCode() {
  const all = requests();
  const [request] = all;
  const base = new URL("v1", document.baseURI).href;
  if (!request) {
    $("source").textContent = "";
  } else if (state.code === "curl") {
    const token = $("key").value ? " \\\n  -H \"authorization: Bearer $TOKEN\"" : "";
    const body = shortened(request.body).replaceAll("'", "'\\''");
    $("source").textContent = `curl -N ${base}/${request.path}${token} \\\n  -H 'content-type: application/json' -d '${body}'`;
  } else if (state.code === "python" && state.skill === "chat") {
    const { messages, stop, reasoning } = request.body;
    const more = `${stop ? `    stop=${JSON.stringify(stop)},\n` : ""}${reasoning ? "    extra_body={\"reasoning\": True},\n" : ""}`;
    $("source").textContent = `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="TOKEN")\nanswer = client.chat.completions.create(\n    model="moondream",\n    messages=${shortened(messages)},\n${more})\nprint(answer.choices[0].message.content)`;
  } else {
    const python = state.code === "python";
    const lines = all.map((each) => (python ? `print(model.${callOf(each, "image", true)})` : `    print(client.${callOf(each, '"image.jpg"', false)})`));
    const image = state.image ? 'image = Image.open("image.jpg")\n' : "";
    $("source").textContent = python
      ? `import moondream as md\n${image && "from PIL import Image\n"}\nmodel = md.vl(endpoint="${base}", api_key="TOKEN")\n${image}${lines.join("\n")}`
      : `from kestrel_client import KestrelClient\n\nwith KestrelClient("${location.hostname}:50051") as client:\n${lines.join("\n")}`;
  }
}

// The call of a Python client for a request, with all that the form says.
function callOf(request, image, moondream) {
  const { length, reasoning, settings, stop = settings && settings.stop } = request.body;
  const skill = state.skill === "chat" ? "query" : state.skill;
  if (skill === "gaze") return moondream ? `detect(${image}, "face")  # the package has no gaze: see curl` : `gaze(${image})`;
  const asked = skill === "caption" ? `length="${length}"` : JSON.stringify(request.label || $("text").value.trim());
  const ends = JSON.stringify(stop);
  const options = `${reasoning ? ", reasoning=True" : ""}${stop ? (moondream ? `, settings={"stop": ${ends}}` : `, stop=${ends}`) : ""}`;
  return `${skill}(${state.image ? image : "None"}, ${asked}${options})`;
}

// Events.

addEventListener("DOMContentLoaded", () => {
  $("key").value = sessionStorage.getItem("key") || "";
  showModel();
  showSamples();
  choose("query");
  $("key").addEventListener("change", () => {
    sessionStorage.setItem("key", $("key").value);
    showModel();
    showCode();
  });
  $("form").addEventListener("submit", run);
  $("stop").addEventListener("click", () => state.running && state.running.abort());
  $("text").addEventListener("input", showCode);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("length").addEventListener("change", showCode);
  $("end").addEventListener("input", showCode);
  $("reasoning").addEventListener("change", showCode);
  const tabs = [...document.querySelectorAll("[data-skill]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab.dataset.skill));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
      choose(next.dataset.skill);
      next.focus();
    });
  }
  for (const button of document.querySelectorAll("[data-code]")) {
    button.addEventListener("click", () => {
      state.code = button.dataset.code;
      for (const each of document.querySelectorAll("[data-code]")) each.setAttribute("aria-pressed", each === button);
      showCode();
    });
  }
  $("copy").addEventListener("click", () => navigator.clipboard.writeText($("source").textContent));
  $("choose").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => useFile($("file").files[0]));
  $("camera").addEventListener("click", startCamera);
  $("shoot").addEventListener("click", shoot);
  $("clear").addEventListener("click", removeImage);
  const drop = $("drop");
  drop.addEventListener("click", () => state.image || state.camera || $("file").click());
  drop.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && $("file").click());
  addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  addEventListener("dragleave", () => drop.classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    useFile(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => useFile(event.clipboardData.files[0]));
});
