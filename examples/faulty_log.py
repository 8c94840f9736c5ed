"""Give a log two faults that cost its cache: chats begin with the time, and one agent request of three sends its tools'
keys in another order.

    anaphora workload chat agent --sessions 40 --rate 0.2 --seed 5 --as openai --out log.jsonl
    python examples/faulty_log.py log.jsonl > faulty.jsonl
"""

import json
import sys
from pathlib import Path

num_agent_requests = 0
for line in Path(sys.argv[1]).read_text().splitlines():
    entry = json.loads(line)
    request = entry["request"]
    if "tools" not in request:
        system = request["messages"][0]
        system["content"] = f"It is {entry['timestamp'][:19]}. {system['content']}"
    else:
        num_agent_requests += 1
        if num_agent_requests % 3 == 0:
            request["tools"] = [dict(reversed(tool.items())) for tool in request["tools"]]
    print(json.dumps(entry))
