"""Two engines under Ray Serve, behind prefix routing: `pip install 'anaphora[ray]'`, then run it.

Without a name it serves the default model, which is downloaded at first use.
"""

import sys

import ray
from openai import OpenAI
from ray import serve

from anaphora.integrations.ray_serve import openai_app

model = sys.argv[1] if len(sys.argv) > 1 else None
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": 8000})
serve.run(openai_app(model, num_replicas=2, engine={"kv_memory_bytes": 256 << 20}))

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
name = client.models.list().data[0].id
for topic in ("the moon", "the sea"):
    messages = [
        {"role": "user", "content": f"You know all about {topic}. Name three facts about it, in short sentences."}
    ]
    for _ in range(3):
        raw = client.chat.completions.with_raw_response.create(
            model=name, messages=messages, max_tokens=48, temperature=0
        )
        answer = raw.parse()
        usage = answer.usage
        print(
            f"{topic:9} engine {raw.headers['x-anaphora-replica']}: {usage.prompt_tokens:4} prompt tokens, "
            f"{usage.prompt_tokens_details.cached_tokens:4} cached, "
            f"{raw.headers['x-anaphora-predicted-cached-tokens']:>4} predicted"
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "And one more?"},
        ]
serve.shutdown()
ray.shutdown()
