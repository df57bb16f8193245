"""The command behind scripts/train_drafter.py: all stages from prompts to the acceptance table."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from sglang_ddtree.bench.prompts import SETS
from sglang_ddtree.demo.model import EOS, prepare_target
from sglang_ddtree.demo.packages import cache_dir
from sglang_ddtree.training.corpus import Sequence, load_sequences
from sglang_ddtree.training.data import encode_prompts, training_prompts
from sglang_ddtree.training.generate import generate_shards
from sglang_ddtree.training.measure import measure, reference_text, table
from sglang_ddtree.training.model import DrafterShape, load_drafter, save_drafter
from sglang_ddtree.training.target import load_target
from sglang_ddtree.training.train import Recipe, initial_drafter, save_times, train, whitening

SHAPE = DrafterShape(rope_theta=100000.0)
PROMPTS = 7500  # before duplicates and overlaps with dev and held-out questions are taken out
PROMPT_LIMIT = 224  # tokens, chat template included
NEW_TOKENS = 160
GROUP = 160  # prompts per shard
SEED = 1


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Flags; the defaults are those of the shipped drafter, which stopped both stages by the clock, however."""
    parser = argparse.ArgumentParser(description="Train a DFlash drafter for SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, help="directory for config.json and model.safetensors")
    parser.add_argument("--work", type=Path, help="text, checkpoints, logs (default: under the cache)")
    parser.add_argument("--stage", choices=["all", "generate", "train", "measure"], default="all")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"training prompts (default {PROMPTS})")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help=f"training steps (default {Recipe.steps})")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end training after so many minutes")
    parser.add_argument("--again", action="store_true", help="train on from the checkpoint of a finished run")
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--generate-minutes", type=float, default=float("inf"), help="stop generating after so long")
    parser.add_argument("--workers", type=int, default=1, help="processes that generate text, one thread each")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help="torch threads for training and measurement")
    parser.add_argument("--split", choices=["dev", "heldout"], default="dev", help="what to measure on (default dev)")
    parser.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args(argv)


def say(message: str) -> None:
    """Progress with the time of day, at once even into a file."""
    print(time.strftime("%H:%M:%S"), message, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen stages; 0 on success."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    work = args.work or cache_dir() / "train"
    work.mkdir(parents=True, exist_ok=True)
    times = work / "times.json"
    directory = prepare_target(say)
    if args.stage in ("all", "generate"):
        began = time.time()
        generate(args, directory, work)
        if args.worker is None:
            save_times(times, generate=time.time() - began)
    if args.stage in ("all", "train"):
        began = time.time()
        train_stage(args, directory, work)
        save_times(times, train=time.time() - began)
    if args.stage in ("all", "measure"):
        began = time.time()
        measure_stage(args, directory, work)
        save_times(times, **{f"measure_{args.split}": time.time() - began})
    return 0


def tokenizer_of(directory: Path):
    """The target's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def generate(args: argparse.Namespace, directory: Path, work: Path) -> None:
    """Text by the target, in as many processes as there are workers."""
    if args.worker is None and args.workers > 1:
        command = [sys.executable, "-m", "sglang_ddtree.training.cli", "--stage", "generate", "--work", str(work)]
        command += ["--prompts", str(args.prompts), "--seed", str(args.seed), "--workers", str(args.workers)]
        command += ["--generate-minutes", str(args.generate_minutes)]
        children = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(args.workers)]
        if any([child.wait() for child in children]):
            raise SystemExit("a process that generates text failed; its message is above")
        return
    prompts = encode_prompts(tokenizer_of(directory), training_prompts(args.prompts, args.seed), PROMPT_LIMIT)
    shards = work / "shards"
    check_same_prompts(prompts, shards)
    generate_shards(
        load_target(directory), prompts, shards, SHAPE.target_layer_ids, EOS, NEW_TOKENS, GROUP,
        args.worker or 0, args.workers, time.time() + 60 * args.generate_minutes, say,
    )  # fmt: skip


def check_same_prompts(prompts: list[list[int]], shards: Path) -> None:
    """Refuse to go on with shards that were made from other prompts."""
    mark = hashlib.sha256(json.dumps([prompts, NEW_TOKENS, GROUP, SHAPE.target_layer_ids]).encode()).hexdigest()
    file = shards / "prompts.sha256"
    shards.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(mark)
    elif file.read_text() != mark:
        raise SystemExit(f"{shards} holds text for other prompts or settings; give another --work or remove it")


def dev_sequences(directory: Path, work: Path, split: str) -> dict:
    """Reference text of every prompt set."""
    target, tokenizer = load_target(directory), tokenizer_of(directory)
    return {
        name: reference_text(target, tokenizer, name, split, work, EOS, SHAPE.target_layer_ids, NEW_TOKENS, say)
        for name in SETS
    }


def train_stage(args: argparse.Namespace, directory: Path, work: Path) -> None:
    """Training from the checkpoint, if there is one, to the drafter directory."""
    target = load_target(directory)
    recipe = Recipe(steps=args.steps, seed=args.seed, learning_rate=args.learning_rate)

    def load() -> list[Sequence]:
        return load_sequences(work / "shards")

    generator = torch.Generator().manual_seed(args.seed)
    whitened = whitening(load(), len(SHAPE.target_layer_ids), generator)
    drafter = initial_drafter(SHAPE, target, load()[:16], whitened[0], args.seed)
    dev = [q for name in SETS for q in load_sequences(work / f"dev-{name}", minimum=9)[:16]]
    checkpoint = work / "checkpoint.pt"
    drafter = train(
        drafter, target.embed, whitened, load, dev, recipe, checkpoint, say, minutes=args.minutes, again=args.again
    )
    save_drafter(drafter, args.out or work / "drafter")
    (work / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
    say(f"drafter written to {args.out or work / 'drafter'}")


def measure_stage(args: argparse.Namespace, directory: Path, work: Path) -> None:
    """The acceptance table of the drafter directory, as it was rounded to bf16."""
    drafter = load_drafter(args.out or work / "drafter")
    embed = load_target(directory).embed
    tallies = {}
    for name, sequences in dev_sequences(directory, work, args.split).items():
        tallies[name] = measure(drafter, embed, sequences)
        say(f"{args.split} {name}: {len(sequences)} answers, {tallies[name].lengths()}")
    result = {name: {**tally.lengths(), "steps": tally.steps["chain"]} for name, tally in tallies.items()}
    (work / f"acceptance-{args.split}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(tallies), flush=True)


if __name__ == "__main__":
    sys.exit(main())
