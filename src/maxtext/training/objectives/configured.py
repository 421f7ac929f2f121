"""The objective that a configuration asks for."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.training.objectives.base import Objective
from maxtext.training.objectives.distillation import KnowledgeDistillation
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.objectives.preference import PreferenceOptimization


def training_objective(config: MaxTextConfig) -> Objective:
  """What is minimised."""
  if config.use_grpo:
    raise ConfigError("use_grpo=true: the loss needs rollouts, which only maxtext.train and maxtext rl make.")
  if config.use_dpo:
    return PreferenceOptimization.of(config)
  if KnowledgeDistillation.is_chosen(config):
    return KnowledgeDistillation.of(config)
  return LanguageModeling(config.z_loss_multiplier, config.num_vocab_tiling, config.mtp_loss_scaling_factor)


def evaluation_objective(config: MaxTextConfig) -> Objective:
  """What is measured on evaluation data."""
  if not config.use_dpo:
    return LanguageModeling(
      tiles=config.num_vocab_tiling, next_token_only=True, mtp_eval_layer=config.mtp_eval_target_module
    )
  return training_objective(config)
