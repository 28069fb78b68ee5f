"""Wrong command lines of those that take a finished model: each words, and what its error says."""

LONG, LONE = "x" * 5000, "\udcff"
# Mistakes of every command that takes the weights of a run or a folder.
OF_SOURCE = [
    (source, "is neither a run nor a folder") for source in ("missing", ".", "notes.md", LONG, LONE)] + [
    ("", "required"), ("~nobody-here/x", "no such user"), ("cut", "config.json is damaged"),
    ("dynamic", "of the kind 'dynamic'"), ("missing --step=last", "--step"), ("missing --sequences=0", "--sequences=0"),
    ("missing --length=1", "--length=1"), ("missing --chunk=20", "--chunk=20: give a multiple of 16"),
    ("missing --chunk=0", "--chunk=0"), ("missing --kv=int4", "did you mean int8?"),
    ("missing --kernel=block", "did you mean blocks?"), ("missing --dtype=bf16", "did you mean bfloat16?"),
    ("missing --limit=", "--limit"), ("missing --limit=0", "--limit=0"), ("missing --limit=lots", "not a valid size"),
    ("missing --tensor=0", "--tensor=0"), ("missing --fsdp=0", "--fsdp=0"),
    ("missing --config.model.n_layers=1", "unrecognized")]
OF_MODELS = {
    "generate": [
        ("missing --prompt=x --prompts=records.jsonl", "--prompt or --prompts"),
        ("missing --out=o", "belongs to --prompts"), ("missing --prompts=", "no name of a file"),
        ("missing --max-tokens=0", "--max-tokens=0: give 1 or more"),
        ("missing --temperature=-1", "--temperature=-1.0"),
        ("missing --temperature=nan", "--temperature=nan"), ("missing --temperature=hot", "--temperature"),
        ("missing --top-p=1.5", "--top-p=1.5"), ("missing --min-p=-1", "--min-p=-1.0"),
        ("missing --top-k=-1", "--top-k=-1"), ("missing --seed=-1", "--seed=-1"), ("missing --stop=", "--stop="),
        (f"missing --seed={2**32}", "less than 2**32"), ("missing --promt=x", "did you mean --prompt or"),
        ("missing more", "unrecognized")],
    "score": [
        ("missing", "--text=TEXT or --texts=FILE"), ("missing --text=x --texts=text.txt", "--text=TEXT"),
        ("missing --texts=", "no name of a file"), ("missing --text=x --out=", "no name of a file"),
        ("missing --txet=x", "did you mean --text?"), ("missing --text=x --max-tokens=3", "unrecognized")],
    "quantize": [
        ("", "required"), ("missing", "give OUT"), ("missing out", "give --calibrate=TEXT"),
        ("missing out --calibrate=", "no name of a file"), ("missing out --calibrate=text.txt", "is neither a run nor"),
        ("missing out --calibrate=text.txt --bits=3", "--bits=3: weights of 4 bits"),
        ("missing out --calibrate=text.txt --group=48", "--group"),
        ("missing out --calibrate=text.txt --format=gptq", "--format"),
        ("missing out --calibrate=text.txt --method=awk", "did you mean awq?"),
        ("missing out --calibrate=text.txt --samples=0", "--samples=0: give 1 or more"),
        ("missing out --calibrate=text.txt --length=1", "--length=1: give 2 or more"),
        ("missing out --calibrate=text.txt --shard-size=0", "--shard-size=0"),
        ("missing out --calibrate=text.txt --limit=lots", "not a valid size"),
        ("missing out --calibrate=text.txt --html=/no/such/page.html", "no folder /no/such"),
        ("missing . --calibrate=text.txt", "is not empty"), ("missing notes.md --calibrate=text.txt", "is no folder"),
        (f"{LONG} out --calibrate=text.txt", "is neither a run nor"),
        ("missing out --target=h100", "OUT=out with the target h100"), ("missing h100", "missing"),
        ("tiny h900", "h900"), ("tiny --target=cpu:1 --calibrate=text.txt", "--calibrate=text.txt with the target"),
        ("tiny cpu:1 --limit=0", "--limit=0"), ("missing out --calibrat=x", "did you mean --calibrate?"),
        ("missing out --calibrate=x --config.model.n_layers=1", "unrecognized")],
    "export": [
        ("", "required"), ("missing", "required"), ("missing out", "missing holds no run"), (". out", "holds no run"),
        (f"{LONG} out", "holds no run"), (f"{LONE} out", "holds no run"), ("notes.md out", "holds no run"),
        ("missing ", "no name of a file or folder"), ("~nobody-here/x out", "no such user"),
        ("missing notes.md", "notes.md is no folder"), ("missing .", "is not empty"),
        ("missing . --force", "holds no model"), ("missing out --step=last", "--step"),
        ("missing out --dtype=bf16", "did you mean bfloat16?"), ("missing out --shard-size=", "--shard-size"),
        ("missing out --shard-size=0", "--shard-size=0"), ("missing out --shard-size=5XB", "not a valid size"),
        ("missing out --shrad-size=5GB", "did you mean --shard-size?"), ("missing out more", "unrecognized"),
        ("missing out --config.train.steps=1", "unrecognized"), ("missing out --merge=yes", "--merge"),
        ("missing out --merg", "did you mean --merge?")],
}
for command, flag in (("generate", "--prompt=x"), ("score", "--text=x")):
    OF_MODELS[command] += [(f"{words} {flag}".lstrip(), message) for words, message in OF_SOURCE]
