"""GRPO of the demo model with TRL, whose rollouts come from 8-bit pages that its trainer replays.

    python examples/rl.py
    make rl RL_ARGS="--case 'fp8, scale 1.0' --steps 5"

A ratio is a token's probability in the trainer over its probability in the rollout.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from hf_fp8kv import demo_model_path, enable, serving

CASES = ["ours", "ours, no replay", "fp8, scale 1.0", "16-bit cache"]


def vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, default="ours")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dtype = "bfloat16" if args.case == "16-bit cache" else "float32"
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype)
    if args.case == "ours":
        serving.enable(model, deterministic=True)
        enable(model, training="stored", deterministic=True)
    elif args.case == "ours, no replay":
        serving.enable(model)
    elif args.case == "fp8, scale 1.0":
        serving.enable(model, dtype="fp8_e4m3", scales=1.0)

    # TRL does not pass the engine's log-probabilities on: keep them by the tokens of each answer.
    rolled: dict[tuple[int, ...], list[float]] = {}
    ratios, generate_batch = [], model.generate_batch

    def keep(*given: Any, **named: Any) -> dict[str, Any]:
        answers = generate_batch(*given, **named)
        rolled.update((tuple(x.generated_tokens), x.logprobs) for x in answers.values())
        return answers

    def compare(_model: object, _args: object, named: dict[str, Any], output: Any) -> None:
        if "labels" not in named:  # a step of the engine
            return
        for labels, found in zip(named["labels"][:, 1:], output.log_probs, strict=True):
            is_answer = labels != -100
            wanted = torch.tensor(rolled[tuple(labels[is_answer].tolist())])
            ratios.append((found[is_answer].detach().float() - wanted).exp())

    model.generate_batch = keep
    model.register_forward_hook(compare, with_kwargs=True)
    config = GRPOConfig(
        output_dir="build/rl", max_steps=args.steps, seed=args.seed, learning_rate=1e-5,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=12, use_cpu=True,
        gradient_checkpointing=False, bf16=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"return_logprobs": True, "num_blocks": 64},
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["The sea is", "I like to eat", "Once upon a time"]})
    trainer = GRPOTrainer(model, vowels, config, train_dataset=data)
    trainer.train()
    ratio, log = torch.cat(ratios), trainer.state.log_history
    rewards = [entry["reward"] for entry in log if "reward" in entry]
    print(f"{args.case}, seed {args.seed}: {len(ratio)} tokens", end=", ")
    print(f"|ratio - 1| up to {(ratio - 1).abs().max():.1e}, std {ratio.std():.1e}", end=", ")
    kl = (ratio - 1 - ratio.log()).mean()
    print(f"KL {kl:.1e}, reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
