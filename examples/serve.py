"""Serve a run behind OpenAI's API, and call it with the openai client.

pip install '.[serve]' openai
python examples/train_on_text.py
python examples/serve.py [RUN]
"""

import socket
import subprocess
import sys
import time

import openai

run = sys.argv[1] if len(sys.argv) > 1 else "runs/text"
with socket.socket() as free:
  free.bind(("127.0.0.1", 0))
  port = free.getsockname()[1]

# In a shell: maxtext serve runs/text --port 8000
server = subprocess.Popen([sys.executable, "-m", "maxtext", "serve", run, "--port", str(port)])
try:
  client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
  while True:
    try:
      name = client.models.list().data[0].id
      break
    except (openai.APIConnectionError, openai.InternalServerError):  # 503 while the model loads
      assert server.poll() is None, "the server has ended"
      time.sleep(0.2)

  whole = client.completions.create(model=name, prompt="def ", max_tokens=12, temperature=0)
  print("whole: ", repr(whole.choices[0].text))
  stream = client.completions.create(model=name, prompt="def ", max_tokens=12, temperature=0, stream=True)
  print("stream:", repr("".join(part.choices[0].text for part in stream)))
finally:
  server.terminate()
  server.wait(30)
