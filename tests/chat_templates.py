"""Chat templates in the styles of well-known models, and a tokenizer with the special tokens of all of them."""

# ruff: noqa: RUF001 (special tokens of DeepSeek)

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from maxtext import MaxTextConfig
from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer

CHATML = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

LLAMA3 = """
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Functions: {{ tools | tojson }}<|eot_id|>{% endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
{%- endfor %}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.tool_calls %}{{ message.content + '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- ']' + eos_token if loop.last else ', ' }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- endfor %}
"""

# The reasoning of answers before the last question is left out, and the last answer always has some.
QWEN3 = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > last.question and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}
{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' if message.role == 'tool' else message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# An answer is opened with <think>, and a finished one has no reasoning.
DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.tool_calls %}{{ '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] | trim + eos_token }}
{%- else %}{{ '<｜User｜>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

# The end of the last answer is another token than that of the ones before it. A call of a tool has a recipient.
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}{% continue %}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

COMMAND = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|START_OF_TURN_TOKEN|>' }}
{{- '<|' + {'assistant': 'CHATBOT', 'user': 'USER'}.get(message.role, 'SYSTEM') + '_TOKEN|>' }}
{{- message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}
"""

PLAIN = """
{%- for message in messages %}{{ message.role | upper }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}ASSISTANT: {% endif %}
"""

# Later versions of two families.
MISTRAL_NAMED = (
  MISTRAL.replace("[TOOL_CALLS][", "")
  .replace(
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}",
  )
  .replace("']' + eos_token if loop.last else ', '", "eos_token if loop.last else ''")
)
DEEPSEEK_BARE = DEEPSEEK.replace(
  "call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n'", "call.function.name + '<｜tool▁sep｜>'"
).replace("'\\n```<｜tool▁call▁end｜>'", "'<｜tool▁call▁end｜>'")

TEMPLATES = {
  "chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3, "deepseek": DEEPSEEK,
  "harmony": HARMONY, "command": COMMAND, "plain": PLAIN, "mistral_named": MISTRAL_NAMED,
  "deepseek_bare": DEEPSEEK_BARE,
}  # fmt: skip

SPECIAL = (
  "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
  "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
  "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<｜User｜>", "<｜Assistant｜>",
  "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
  "<|return|>", "<|call|>", "<|python_tag|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
  "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
               "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
               "<｜tool▁call▁end｜>")  # fmt: skip
VOCAB_SIZE = 512


def make_tokenizer(folder):
  """Writes a byte-level tokenizer, with merges across white space, as `tokenizer.json` and its configuration."""
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  bpe.decoder = decoders.ByteLevel()
  size = VOCAB_SIZE - len(SPECIAL) - len(NOT_SPECIAL)
  trainer = trainers.BpeTrainer(
    vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  spaced = " the: theQ theX theZ the? theJ the"  # a space is joined with what follows
  bpe.train_from_iterator([spaced, "\n\nthe answer\n is\n\n the\n one:\n the other  \n\n and the last\n"] * 9, trainer)
  bpe.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
  bpe.add_tokens([AddedToken(name, special=False, normalized=False) for name in NOT_SPECIAL])
  folder.mkdir(parents=True, exist_ok=True)
  bpe.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
  return folder


def open_tokenizer(folder, style, **keys):
  """The tokenizer with the template of a style."""
  config = MaxTextConfig(
    tokenizer_type="huggingface",
    tokenizer_path=str(folder),
    vocab_size=VOCAB_SIZE,
    chat_template=TEMPLATES[style],
    **keys,
  )
  return load_tokenizer(tokenizer_options(config))
