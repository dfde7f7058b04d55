"""Train the demo model by GRPO with TRL. The trainer replays the 8-bit pages of the rollouts.

    python examples/rl.py

`make rl` installs TRL. `--chunk` is the number of tokens in a step of the engine.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from hf_fp8kv import demo_model_path, enable, serving


def vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    cases = ["ours", "ours, no replay", "fp8, scale 1.0", "16-bit cache"]
    parser.add_argument("--case", choices=cases, default="ours")
    for name, value in ("steps", 20), ("seed", 0), ("chunk", 256):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    engine = {"return_logprobs": True, "num_blocks": 64, "max_batch_tokens": args.chunk}
    dtype = "bfloat16" if args.case == "16-bit cache" else "float32"
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype)
    if args.case != "16-bit cache":
        fp8: Any = {"dtype": "fp8_e4m3", "scales": 1.0} if args.case == "fp8, scale 1.0" else {}
        serving.enable(model, deterministic=args.case == "ours", **fp8)
    if args.case == "ours":
        enable(model, training="stored", deterministic=True)
    # Log-probabilities by the tokens of each answer, because TRL drops the engine's.
    rollouts: dict[tuple[int, ...], list[float]] = {}
    ratios, generate_batch = [], model.generate_batch

    def generate(*args: Any, **kwargs: Any) -> Any:
        answers = generate_batch(*args, **kwargs)
        rollouts.update((tuple(x.generated_tokens), x.logprobs) for x in answers.values())
        return answers

    def score(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        labels = kwargs.pop("labels")[:, 1:]
        log = forward(*args, use_cache=False, **kwargs).logits[:, :-1].float().log_softmax(-1)
        log_probs = log.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        for row, in_trainer in zip(labels, log_probs.detach(), strict=True):
            in_rollout = rollouts[tuple(row[row != -100].tolist())]
            ratios.append((in_trainer[row != -100] - torch.tensor(in_rollout)).exp())
        return SimpleNamespace(log_probs=log_probs, entropy=-(log.exp() * log).sum(-1))

    model.generate_batch = generate
    config = GRPOConfig(
        output_dir="build/rl", max_steps=args.steps, seed=args.seed, learning_rate=1e-5,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=12, use_cpu=True,
        gradient_checkpointing=False, bf16=False, report_to="none", logging_steps=1,
        disable_tqdm=True, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=engine,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["The sea is", "I like to eat", "Once upon a time"]})
    trainer = GRPOTrainer(model, vowels, config, train_dataset=prompts)
    # TRL's own product with the head's weights adds in a different order.
    forward, model.forward = model.forward, score
    trainer.train()
    ratio = torch.cat(ratios)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"{args.case}, {len(ratio)} tokens, KL {(ratio - 1 - ratio.log()).mean():.1e}")
    print(f"|ratio - 1| up to {(ratio - 1).abs().max():.1e}, std {ratio.std():.1e}")
    print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
