"""A Hydra project of one's own with the package's config groups: everything of a run is chosen on the command line.

    python examples/04_hydra.py
    python examples/04_hydra.py plan=bf16 model=gpt2_tiny trainer.max_steps=100
    python examples/04_hydra.py -m plan=fp32,bf16,careful

conf/config.yaml finds the groups by hydra.searchpath, and conf/plan/careful.yaml builds upon the package's plan/fp16.
Each run leaves its config and its report in Hydra's folder for it.
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from lightning_mp import MixedPrecisionPlan, trainer_kwargs


@hydra.main(config_path="04_hydra/conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> float:
    seed_everything(0)
    plan = MixedPrecisionPlan.from_config(config.plan)
    callbacks = list(instantiate(config.callbacks).values())
    trainer = Trainer(
        **trainer_kwargs(plan, strategy=instantiate(config.strategy), callbacks=callbacks, **config.trainer)
    )
    model, data = instantiate(config.model), instantiate(config.data)
    trainer.fit(model, data)
    (validation,) = trainer.validate(model, data, verbose=False)
    print(f"{plan.precision}: validation loss {validation['val/loss']:.4f} after {trainer.global_step} steps,", end=" ")
    print(f"loss scale {plan.scaler.get_scale() if plan.scaler else 'none'}, report in {trainer.default_root_dir}")
    return validation["val/loss"]  # for Hydra's sweepers


if __name__ == "__main__":
    main()
