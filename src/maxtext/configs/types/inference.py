"""Prefill, decoding and serving."""

from pydantic import Field

from maxtext.configs.types.enums import SamplingStrategy
from maxtext.configs.types.section import Section


class InferenceGeneral(Section):
  """Lengths, prompt and modes."""

  max_target_length: int = Field(2048, description="Length of a sequence, in tokens.")
  max_prefill_predict_length: int = Field(
    64, description="Longest prompt, in tokens; the rest of the target length is generated."
  )
  prompt: str = Field("I love to", description="Text that decoding continues.")
  load_from_prefill_dir: bool = Field(
    False, description="True reads the prompt's cache from prefill_cache_dir instead of computing it."
  )
  prefill_cache_dir: str = Field("", description="Folder where prompt caches are saved and read; '' is none.")
  autoregressive_decode_assert: str = Field(
    "", description="Text the decoded output must equal, for tests; '' is no check."
  )
  model_call_mode: str = Field(
    "", description="'inference' takes the inference path of layers that have one; '' is training."
  )
  use_chunked_prefill: bool = Field(
    False, description="True processes the prompt in pieces of prefill_chunk_size tokens."
  )
  prefill_chunk_size: int = Field(256, description="Tokens per piece of the prompt, with use_chunked_prefill.")
  enable_model_warmup: bool = Field(
    False, description="True compiles the prefill and generate programs before the server takes requests."
  )
  enable_llm_inference_pool: bool = Field(
    False, description="True starts the server as a pool of inference workers (multi-controller JAX)."
  )
  multi_sampling: bool = Field(False, description="True draws several completions from one prompt's cache.")
  return_log_prob: bool = Field(False, description="True returns the log probability of each token with the output.")


class Decoding(Section):
  """How the next token is chosen."""

  decode_sampling_strategy: SamplingStrategy = Field(
    SamplingStrategy.GREEDY, description="How the next token is picked: greedy, weighted, nucleus, topk or composite."
  )
  decode_sampling_nucleus_p: int | float = Field(
    -1.0, description="Probability mass kept in nucleus sampling, 0 to 1; -1 is unset."
  )
  decode_sampling_top_k: int = Field(0, description="Most likely tokens kept in top-k sampling; 0 is unset.")
  decode_sampling_temperature: float = Field(
    1.0, description="Divisor of logits when sampling; lower is closer to greedy."
  )


class InferenceLayout(Section):
  """Order of dimensions in caches and products."""

  stack_prefill_result_cache: bool = Field(
    False, description="True stacks the layers' prompt caches in one array, for cheaper transfer."
  )
  prefill_cache_axis_order: str = Field(
    "1,2,0,3", description="Stored axis order of the prompt cache, over batch, sequence, heads, head width."
  )
  ar_cache_axis_order: str = Field(
    "1,2,0,3", description="Stored axis order of the generation cache, over batch, sequence, heads, width."
  )
  compute_axis_order: str = Field(
    "0,1,2,3", description="Axis order in cached attention compute, over batch, sequence, heads, head width."
  )
  reshape_q: bool = Field(False, description="True reshapes the query to suit the cache layout in generation steps.")


class InferenceServer(Section):
  """The server."""

  inference_server: str = Field(
    "MaxtextInterleavedServer", description="Server class: prefill and generation interleaved on one slice, or on two."
  )
  prefill_slice: str = Field("v5e-16", description="Accelerator slice type for prefill when the two phases are split.")
  generate_slice: str = Field(
    "v5e-16", description="Accelerator slice type for generation when the two phases are split."
  )


class InferenceBenchmark(Section):
  """Micro-benchmarks."""

  inference_microbenchmark_prefill_lengths: str = Field(
    "64,128,256,512,1024", description="Prompt lengths to time, in tokens, separated by commas."
  )
  inference_microbenchmark_stages: str = Field(
    "prefill,generate", description="Phases to time, separated by commas: prefill, generate."
  )
  inference_microbenchmark_loop_iters: int = Field(10, description="Timed repetitions of each measurement.")
  inference_microbenchmark_log_file_path: str = Field(
    "", description="File for the timing results as JSON; '' writes none."
  )
  inference_microbenchmark_num_samples: list[int] = Field(
    [1, 2, 3, 4, 5], description="Completion counts to time in multi-sampling prefill."
  )
  inference_metadata_file: str = Field(
    "", description="JSON file of run details stored with the benchmark results; '' is none."
  )
  inference_benchmark_test: bool = Field(False, description="True marks the run as an inference benchmark.")


class PrefixCaching(Section):
  """Reuse of shared beginnings."""

  enable_prefix_caching: bool = Field(
    False, description="True reuses the cache of prompt beginnings already seen by the server."
  )
  prefix_caching_hbm_byte: int = Field(10000000000, description="Device memory for cached prompt beginnings, in bytes.")
  prefix_caching_dram_byte: int = Field(100000000000, description="Host memory for cached prompt beginnings, in bytes.")
