"""What the compiler is told: by chip, by the user, and nothing where there is nothing to say."""

import jax
import pytest

from maxtext import ConfigError, load_config
from maxtext.mesh.compiler import compiler_options
from maxtext.mesh.topology import Topology

FUSED = "xla_tpu_enable_async_collective_fusion"


@pytest.fixture(scope="module", params=["v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8"])
def tpu(request):
  pytest.importorskip("libtpu")
  return Topology.named(request.param).devices()[0]


def test_collectives_overlap_on_every_tpu_unless_the_user_says_otherwise(tpu, monkeypatch):
  ours = compiler_options(tpu)
  assert ours[FUSED] is True
  assert compiler_options(tpu, f"--{FUSED}=false --xla_other=3") == ours | {FUSED: "false", "xla_other": "3"}
  monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_unheard_of=true --{FUSED}=false")
  assert compiler_options(tpu) == {name: value for name, value in ours.items() if name != FUSED}


def test_the_compiler_knows_every_option(tpu):
  place = jax.sharding.SingleDeviceSharding(tpu)
  one = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32, sharding=place)

  def compile_with(options):
    return jax.jit(jax.numpy.negative, compiler_options=options).lower(one).compile()

  assert compile_with(compiler_options(tpu)).as_text()
  with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unheard_of"):
    compile_with(compiler_options(tpu, "--xla_unheard_of=1"))


def test_a_cpu_is_told_nothing():
  assert compiler_options(jax.devices("cpu")[0]) == {}


def test_flags_that_are_none_are_refused():
  with pytest.raises(ConfigError, match="compile_xla_flags: 'fast' must look like"):
    load_config("llama2-7b", compile_topology="v5p-8", compile_xla_flags="fast")
  with pytest.raises(ConfigError, match=r"compile_xla_flags.*no effect without compile_topology"):
    load_config("llama2-7b", compile_xla_flags="--xla_x=1", strict=True)
