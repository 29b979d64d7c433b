"""A program of LangChain and LlamaIndex, unmodified, run in an environment of its own: BASE_URL KEY IMAGE."""

import base64
import json
import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike

base_url, key, path = sys.argv[1:]
with open(path, "rb") as file:
    data = file.read()
url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
question = "How many red circles are there?"

chain = ChatOpenAI(model="moondream2", base_url=base_url, api_key=key, temperature=0)
asked = HumanMessage(
    [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
)
whole = chain.invoke([asked])
out = {
    "langchain": whole.content,
    "langchain_tokens": whole.usage_metadata["output_tokens"],
    "langchain_stream": "".join(part.content for part in chain.stream([asked])),
}
index = OpenAILike(
    model="moondream2",
    api_base=base_url,
    api_key=key,
    is_chat_model=True,
    temperature=0,
    context_window=2048,
)
message = ChatMessage(
    role="user",
    blocks=[ImageBlock(image=data, image_mimetype="image/jpeg"), TextBlock(text=question)],
)
out["llama_index"] = index.chat([message]).message.content
out["llama_index_stream"] = "".join(part.delta or "" for part in index.stream_chat([message]))
print(json.dumps(out))
