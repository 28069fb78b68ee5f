"""Renders a chat template in a separate process, since a downloaded template is a program that is not trusted.

The script needs only the standard library and jinja2. It reads a JSON line with the template, then a JSON line per
batch of conversations, and writes one line per conversation. The operating system ends the process if it runs too long
or needs too much memory; jinja2's sandbox prevents everything else. As in transformers, a template can use
`raise_exception`, `strftime_now`, `tojson`, loop controls and the block `generation`.
"""

import json
import sys
import time

# Marks before and after the content of a `generation` block. These Unicode noncharacters do not occur in text.
BEGIN, END = "\ufdd0", "\ufdd1"
# `strftime_now` always returns this day, the date in Llama 3's templates, so that the data of a run do not depend on
# the day.
TODAY = (2024, 7, 26)
SECONDS = 5  # maximum processor time for one conversation
BYTES = 1 << 30  # maximum address space
# Limits over all conversations. Each rendering adds to the allowance about ten times what published templates need, and
# subtracts what it used. TOTAL_*: the allowance at the start, which is also its maximum. *_EACH: the amount that a
# rendering adds. *_PER_CHARACTER: the amount that it adds per character of the conversation.
TOTAL_SECONDS, SECONDS_EACH, SECONDS_PER_CHARACTER = 10.0, 5e-4, 2e-7  # processor time
TOTAL_CHARACTERS, CHARACTERS_EACH, CHARACTERS_PER_CHARACTER = 1 << 22, 1 << 14, 4


def environment():
    """Returns a sandboxed jinja2 environment with the functions that chat templates may call, as in transformers."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Implements {% generation %}, the block of a chat template that marks the text to train on."""

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

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime(*TODAY).strftime(form)
    return sandbox


def rendered(template, variables, asked):
    """Renders a conversation with a chat template. Returns {"text": the whole conversation, "before": for each answer
    the text before it, "up_to": for each answer the text up to its end}.

    Args:
      template: the compiled jinja2 template.
      variables: name of a further variable of the template, such as eos_token -> its value.
      asked: the request, a dict with "messages", "tools", and the booleans "before" and "up_to". A list whose boolean
        is false is not needed and is returned empty.
    """
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
    """The processor time, in seconds, and the number of characters that a chat template may still use."""

    def __init__(self, seconds, characters):
        self.totals = self.left = seconds, characters
        self.conversations = self.given = 0
        self.used = 0.0, 0

    def spend(self, asked, answer, seconds):
        """Adds the allowance for one conversation and subtracts the time and characters that it used. Returns the
        reason to stop the template if the allowance is used up, else "".

        `asked`: the request. `answer`: the rendered texts, without "text" if rendering failed. `seconds`: the processor
        time.
        """
        texts = (
            [answer["text"], *answer["before"], *answer["up_to"]] if "text" in answer else [""]
        )  # "": rendering failed
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
    """Limits the memory of this process to `most` bytes.

    Returns a function that limits the processor time of a conversation. Called with a number of seconds, it starts the
    timer; called with 0, it stops the timer.
    """
    try:
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        # SIGPROF ends the process even inside C code. It counts processor time, which other programs do not increase.
        return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    except (ImportError, ValueError, OSError):  # the system has no such limits
        return lambda seconds: None


def main():
    """Reads requests from stdin, one per line, and writes the rendered conversations to stdout until the input
    ends.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def answer(reply):
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()

    first = json.loads(requests.readline())
    sandbox, allowance = environment(), Allowance(*first["totals"])
    clock, seconds = limit(first["bytes"]), first["seconds"]
    clock(seconds)
    try:
        template = sandbox.from_string(first["template"])
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
                reply = rendered(template, first["variables"], asked)
            except MemoryError:
                reply = {"error": f"it needs more than {first['bytes'] >> 20} MiB"}
            except Exception as error:
                reply = {"error": (str(error) or type(error).__name__)[:300]}
            clock(0)
            if reason := allowance.spend(asked, reply, time.process_time() - began):
                answer({"stopped": reason})
                return
            answer(reply)


if __name__ == "__main__":
    main()
