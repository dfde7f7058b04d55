"""Train with GRPO in TRL. By default the trainer attends to the same 8-bit K and V as the rollouts.

    python examples/rl.py

`make rl` installs TRL. --chunk is the maximum number of tokens in a step of the engine.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from hf_fp8kv import demo_model_path, enable, serving


def reward_vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(char in "aeiou" for char in text) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cases = ["replayed", "not replayed", "16-bit cache", "fp8, scale 1.0"]
    parser.add_argument("--case", choices=cases, default="replayed")
    for name, default in {"steps": 20, "seed": 0, "chunk": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    engine_options = {"return_logprobs": True, "num_blocks": 64, "max_batch_tokens": args.chunk}
    dtype = "bfloat16" if args.case == "16-bit cache" else "float32"
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype)
    if args.case != "16-bit cache":
        options = {"dtype": "fp8_e4m3", "scales": 1.0} if args.case == "fp8, scale 1.0" else {}
        serving.enable(model, deterministic=args.case == "replayed", **options)
    if args.case == "replayed":
        enable(model, training="stored", deterministic=True)
    logps_by_answer: dict[tuple[int, ...], list[float]] = {}
    row_ratios = []

    def generate_batch(*args: Any, **kwargs: Any) -> Any:
        """Generate answers, and store the engine's log-probabilities, which TRL discards."""
        answers = run_engine(*args, **kwargs)
        logps_by_answer.update((tuple(a.generated_tokens), a.logprobs) for a in answers.values())
        return answers

    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Score without TRL's fused LM head, whose order of sums differs from the model's."""
        if not fused_lm_head:
            return run_model(*args, **kwargs)
        labels = kwargs.pop("labels")[:, 1:]
        logps = run_model(*args, use_cache=False, **kwargs).logits[:, :-1].float().log_softmax(-1)
        token_logps = logps.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        for row, trainer_logps in zip(labels, token_logps.detach(), strict=True):
            rollout_logps = logps_by_answer[tuple(row[row != -100].tolist())]
            row_ratios.append((trainer_logps[row != -100] - torch.tensor(rollout_logps)).exp())
        return SimpleNamespace(log_probs=token_logps, entropy=-(logps.exp() * logps).sum(-1))

    run_engine, model.generate_batch = model.generate_batch, generate_batch
    config = GRPOConfig(
        output_dir="build/rl", max_steps=args.steps, seed=args.seed, learning_rate=1e-5,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=12, use_cpu=True,
        gradient_checkpointing=False, bf16=False, report_to="none", logging_steps=1,
        disable_tqdm=True, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=engine_options,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["The sea is", "I like to eat", "Once upon a time"]})
    trainer = GRPOTrainer(model, reward_vowels, config, train_dataset=prompts)
    run_model, model.forward = model.forward, forward
    trainer.train()
    ratios = torch.cat(row_ratios)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"{args.case}, {len(ratios)} tokens, KL {(ratios - 1 - ratios.log()).mean():.1e}")
    print(f"|ratio - 1| up to {(ratios - 1).abs().max():.1e}, std {ratios.std():.1e}")
    print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
