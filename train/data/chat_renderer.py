"""Renders a chat template in a process of its own, since a template is a program that came with a download.

Run as a script, of the standard library and jinja2 alone: a line of JSON with the template, then a line for every batch
of conversations; one line comes back for each conversation. The operating system ends what runs too long or takes too
much memory; jinja2's sandbox keeps it from everything else. As in transformers a template has `raise_exception`,
`strftime_now`, `tojson`, loop controls and the block `generation`.
"""

import json
import sys
import time

# Around what the block `generation` holds: Unicode keeps these out of text.
BEGIN, END = "\ufdd0", "\ufdd1"
# `strftime_now` of a template gives this day, that of the cut-off in the templates of Llama 3: the data of a run must
# be the same tomorrow.
TODAY = (2024, 7, 26)
SECONDS = 5  # for one conversation
BYTES = 1 << 30  # of address space
# Limits over all conversations. Each rendering adds to the allowance about ten times what published templates need, and
# subtracts what it used. TOTAL_*: the allowance at the start, which is also its maximum. *_EACH: the amount that a
# rendering adds. *_PER_CHARACTER: the amount that it adds per character of the conversation.
TOTAL_SECONDS, SECONDS_EACH, SECONDS_PER_CHARACTER = 10.0, 5e-4, 2e-7  # processor time
TOTAL_CHARACTERS, CHARACTERS_EACH, CHARACTERS_PER_CHARACTER = 1 << 22, 1 << 14, 4


def environment():
    """Returns jinja2's sandbox with the functions that transformers gives a template."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks the text that the model learns."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(lineno)

        def marked(self, caller):
            return BEGIN + caller() + END

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime(*TODAY).strftime(form)
    return made


def rendered(template, variables, asked):
    """Renders a conversation: its text and, if asked for, the text before each answer and the text up to its end."""
    messages, tools = asked["messages"], asked["tools"]

    def render(count, generation_prompt):
        return template.render(
            messages=messages[:count], tools=tools, documents=None, add_generation_prompt=generation_prompt, **variables
        )

    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return {
        "text": render(len(messages), False),
        "before": [render(number, True) for number in answers] if asked["before"] else [],
        "up_to": [render(number + 1, False) for number in answers] if asked["up_to"] else [],
    }


class Allowance:
    """The processor seconds and characters that the template may still use."""

    def __init__(self, seconds, characters):
        self.totals = self.left = seconds, characters
        self.conversations = self.given = 0
        self.used = 0.0, 0

    def spend(self, asked, answer, seconds):
        """Subtracts what a conversation used; returns the reason to stop, or "" if the allowance suffices."""
        texts = [answer["text"], *answer["before"], *answer["up_to"]] if "text" in answer else [""]  # "": it failed
        given = len(json.dumps([asked["messages"], asked["tools"]]))
        written = sum(map(len, texts))
        added = (
            len(texts) * (SECONDS_EACH + SECONDS_PER_CHARACTER * given),
            len(texts) * (CHARACTERS_EACH + CHARACTERS_PER_CHARACTER * given),
        )
        self.left = tuple(
            min(left, total) + more - used
            for left, total, more, used in zip(self.left, self.totals, added, (seconds, written), strict=True)
        )
        self.conversations, self.given = self.conversations + 1, self.given + given
        self.used = self.used[0] + seconds, self.used[1] + written
        plural = "" if self.conversations == 1 else "s"
        share = f"for {self.conversations:,} conversation{plural} of {self.given:,} characters"
        if self.left[0] < 0:
            return f"took {self.used[0]:.1f} s {share}"
        return f"wrote {self.used[1]:,} characters {share}" if self.left[1] < 0 else ""


def limit(most):
    """Bounds the memory of this process, and returns a function that starts, or ends, the time of a conversation."""
    try:
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        # SIGPROF ends it, even inside of C. Processor time, since a busy machine is no fault of the template.
        return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    except (ImportError, ValueError, OSError):  # no such limits here
        return lambda seconds: None


def main():
    """Answers lines of requests until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def answer(found):
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()

    first = json.loads(requests.readline())
    made, allowance = environment(), Allowance(*first["totals"])
    clock, seconds = limit(first["bytes"]), first["seconds"]
    clock(seconds)
    try:
        template = made.from_string(first["template"])
    except (Exception, MemoryError) as error:
        answer({"error": f"{type(error).__name__}: {error}"[:300]})
        return
    clock(0)
    answer({})
    for line in requests:
        for asked in json.loads(line):
            clock(seconds)
            began = time.process_time()
            try:
                found = rendered(template, first["variables"], asked)
            except MemoryError:
                found = {"error": f"it needs more than {first['bytes'] >> 20} MiB"}
            except Exception as error:
                found = {"error": (str(error) or type(error).__name__)[:300]}
            clock(0)
            if reason := allowance.spend(asked, found, time.process_time() - began):
                answer({"stopped": reason})
                return
            answer(found)


if __name__ == "__main__":
    main()
