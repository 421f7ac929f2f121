"""What a run shows of itself."""

from pydantic import Field

from maxtext.configs.types.enums import ProfilerType, XProfTPUPowerTraceMode
from maxtext.configs.types.section import Section


class Metrics(Section):
  """Where figures go."""

  metrics_file: None | str = Field(None, description="Append one JSON object per step to this file.")
  gcs_metrics: bool = Field(False, description="True writes step metrics to the run's bucket folder.")
  save_config_to_gcs: bool = Field(
    False, description="True writes the resolved configuration to the run's bucket folder."
  )
  record_internal_nn_metrics: int = Field(
    0, ge=0, description="Root mean squares of each layer's activations among the metrics when above 0; 0 is none."
  )
  prometheus_port: int = Field(0, description="Port of the Prometheus metrics server; 0 starts none.")
  enable_checkpoint_cloud_logger: bool = Field(
    False, description="True sends checkpoint save and restore events to cloud logging."
  )
  enable_tunix_perf_metrics: bool = Field(
    False, description="True collects Tunix timing metrics in post-training runs."
  )


class Tensorboard(Section):
  """TensorBoard."""

  enable_tensorboard: bool = Field(True, description="True writes metrics as TensorBoard events.")
  use_vertex_tensorboard: bool = Field(False, description="True uploads TensorBoard events to Vertex AI.")
  vertex_tensorboard_project: str | None = Field(
    "", description="Cloud project of the Vertex TensorBoard; '' is the gcloud default."
  )
  vertex_tensorboard_region: str | None = Field(
    "", description="Cloud region of the Vertex TensorBoard; needed to upload to it."
  )


class Profiling(Section):
  """Traces of where time goes."""

  profiler: ProfilerType = Field(
    ProfilerType.NONE, description="Trace tool: '' is none, 'xplane' is JAX's own, 'nsys' is NVIDIA Nsight."
  )
  upload_all_profiler_results: bool = Field(
    False, description="True saves traces from every host; false from the first only."
  )
  skip_first_n_steps_for_profiler: int = Field(
    1, description="Steps before the trace starts, past compilation and warm-up."
  )
  profiler_steps: int = Field(5, description="Steps in one trace.")
  profile_cleanly: bool = Field(
    True, description="True waits for the devices at both ends of the trace, so steps are whole."
  )
  profile_periodically_period: int = Field(-1, description="Steps from one trace to the next; -1 traces once.")
  hide_profiler_step_metric: bool = Field(False, description="True leaves the per-step marker out of the trace.")
  enable_jax_profiler: bool = Field(False, description="True opens a port where a live trace can be taken.")
  jax_profiler_port: int = Field(9999, description="Port of the live trace server, with enable_jax_profiler.")
  enable_tpu_profiling_options: bool = Field(
    False, description="True passes the tpu_num_* chip and SparseCore settings to the profiler."
  )
  tpu_num_chips_to_profile_per_task: int = Field(1, description="TPU chips traced per host process.")
  tpu_num_sparse_cores_to_trace: int = Field(2, description="SparseCores traced per TPU chip.")
  tpu_num_sparse_core_tiles_to_trace: int = Field(1, description="Tiles traced in each SparseCore.")
  xprof_tpu_power_trace_level: XProfTPUPowerTraceMode = Field(
    XProfTPUPowerTraceMode.POWER_TRACE_NONE,
    description="Detail of TPU power readings in the trace: none, normal or SPI.",
  )
  xprof_e2e_enable_fw_throttle_event: bool = Field(
    False, description="True records firmware throttling events in the trace."
  )
  xprof_e2e_enable_fw_power_level_event: bool = Field(
    False, description="True records firmware power-level changes in the trace."
  )
  xprof_e2e_enable_fw_thermal_event: bool = Field(
    False, description="True records firmware temperature events in the trace."
  )
  profile_power_events: bool = Field(
    False, description="True records TPU power and firmware events, as set by the xprof_* keys."
  )


class HloDump(Section):
  """Programs as the compiler sees them."""

  dump_hlo: bool = Field(False, description="True saves the compiled HLO modules for debugging.")
  dump_step: int = Field(-1, description="Step at which to save the HLO; -1 ties it to no step.")
  dump_hlo_local_dir: str = Field("/tmp/xla_dump/", description="Local folder that XLA writes HLO files into.")
  dump_hlo_delete_local_after: bool = Field(True, description="True deletes the local HLO files once uploaded.")
  dump_hlo_gcs_dir: str = Field("", description="Bucket folder for HLO files; '' is xla_dump under the run's output.")
  dump_hlo_module_name: str = Field(
    "jit_train_step", description="Text that a module's file name must hold to be uploaded."
  )
  dump_hlo_local_module_name: str = Field(
    "jit_train_step", description="Text that a module's name must hold to be written locally; '' is all."
  )
  dump_hlo_xla_flags: str = Field(
    "", description="XLA flags for the dump; '' builds them from the folder and module name."
  )
  dump_hlo_upload_all: bool = Field(False, description="True uploads from every host, false from the first only.")
  dump_jaxpr: bool = Field(False, description="True saves the train step's jaxpr for debugging.")
  dump_jaxpr_local_dir: str = Field("/tmp/jaxpr_dump/", description="Local folder for jaxpr files.")
  dump_jaxpr_delete_local_after: bool = Field(True, description="True deletes the local jaxpr files once uploaded.")
  dump_jaxpr_gcs_dir: str = Field(
    "", description="Bucket folder for jaxpr files; '' is jaxpr_dump under the run's output."
  )


class StackTrace(Section):
  """Where every process stands."""

  collect_stack_trace: bool = Field(
    False, description="True records stack traces of every thread at intervals, to find hangs."
  )
  stack_trace_to_cloud: bool = Field(
    False, description="True sends stack traces to cloud logging, false to the console."
  )
  stack_trace_interval_seconds: int = Field(600, description="Seconds between stack traces.")


class Goodput(Section):
  """Share of time that was useful."""

  enable_goodput_recording: bool = Field(
    False, description="True copies the journal, from which goodput is computed, to a bucket too; disks always have it."
  )
  monitor_goodput: bool = Field(
    False, description="True computes goodput during the run, as metrics; needs enable_goodput_recording."
  )
  goodput_upload_interval_seconds: int = Field(30, description="Seconds between metrics of goodput.")
  enable_pathways_goodput: bool = Field(False, description="True measures goodput for jobs that run on Pathways.")
  monitor_step_time_deviation: bool = Field(
    True, description="True tracks how far step times stray from their median; needs monitor_goodput."
  )
  step_deviation_interval_seconds: int = Field(30, description="Seconds between metrics of step-time deviation.")
  enable_gcp_goodput_metrics: bool = Field(True, description="True also sends goodput to Google Cloud Monitoring.")
  enable_gcp_step_deviation_metrics: bool = Field(
    True, description="True also sends step-time deviation to Google Cloud Monitoring."
  )


class Events(Section):
  """Who hears of what happens to a run. The specification has no such keys."""

  event_command: str = Field(
    "", description="Command that gets a JSON object on its input on failure, stall and recovery; '' is none."
  )
  event_stall_seconds: int = Field(
    0, ge=0, description="Seconds without a finished step after which event_command hears of a stall; 0: never."
  )


class ExperimentTrackers(Section):
  """Where a team has the curves of all its runs. The specification has no such keys."""

  wandb_project: str = Field(
    "", description="Weights & Biases project that gets the metrics; '' is none. Its own variables say the rest."
  )
  mlflow_experiment: str = Field(
    "", description="MLflow experiment that gets the metrics; '' is none. MLFLOW_TRACKING_URI says where it is."
  )


class GcpMonitoring(Section):
  """Monitoring by Google Cloud."""

  report_heartbeat_metric_for_gcp_monitoring: bool = Field(
    False, description="True sends a regular sign of life to Google Cloud Monitoring."
  )
  heartbeat_reporting_interval_in_seconds: int = Field(5, description="Seconds between heartbeats.")
  report_performance_metric_for_gcp_monitoring: bool = Field(
    False, description="True sends a performance metric to Google Cloud Monitoring."
  )


class ManagedMLDiagnostics(Section):
  """Managed diagnostics."""

  managed_mldiagnostics: bool = Field(
    False, description="True reports metrics and profiles to Google Cloud ML Diagnostics."
  )
  managed_mldiagnostics_run_group: str = Field(
    "", description="Name under which ML Diagnostics groups runs; '' is no group."
  )
