// A program of the unmodified npm package "openai": BASE_URL KEY IMAGE. Prints JSON, as openai_program.py does.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, apiKey, path] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const url = `data:image/jpeg;base64,${readFileSync(path).toString("base64")}`;

function ask(text, options = {}) {
  const content = [
    { type: "image_url", image_url: { url } },
    { type: "text", text },
  ];
  const messages = [{ role: "user", content }];
  return client.chat.completions.create({ model: "moondream2", messages, temperature: 0, ...options });
}

const question = "How many red circles are there?";
const whole = await ask(question);
let streamed = "";
let usage = null;
for await (const chunk of await ask(question, { stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
const completion = await client.completions.create({ model: "moondream2", prompt: ["What is red?", "Why?"], max_tokens: 8 });
const out = {
  answer: whole.choices[0].message.content,
  finish_reason: whole.choices[0].finish_reason,
  tokens: whole.usage.completion_tokens,
  stream: streamed,
  stream_tokens: usage.completion_tokens,
  choices: (await ask(question, { n: 3 })).choices.map((choice) => choice.message.content),
  boxes: JSON.parse((await ask("Detect: green crescent")).choices[0].message.content),
  completions: completion.choices.length,
  models: (await client.models.list()).data.map((model) => model.id),
};
try {
  await ask(question, { n: 99 });
} catch (error) {
  out.bad_request = [error.param, error.status, error instanceof OpenAI.BadRequestError];
}
try {
  await new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list();
} catch (error) {
  out.wrong_key = error.code;
}
console.log(JSON.stringify(out));
