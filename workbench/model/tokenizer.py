"""Text to ids and back by the checkpoint's own tokenizer.json, and its chat template.

A beginning-of-sequence token is never invented: ``encode`` adds nothing that the text does not hold.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from workbench.core.errors import CheckpointError, UserError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Tokenizer:
    """Thin wrapper over ``tokenizers.Tokenizer`` with the files beside it.

    Args:
        backend: The tokenizer.
        config: Parsed tokenizer_config.json; may be empty.
        fingerprint: Hash of tokenizer.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], fingerprint: str) -> None:
        self.backend, self.config, self.fingerprint = backend, config, fingerprint
        self._marks = ("", "")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint directory.

        Args:
            path: The directory.

        Returns:
            The tokenizer.

        Raises:
            CheckpointError: tokenizer.json is missing or unreadable.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{path} has no tokenizer.json; text needs one (token ids can be given instead)")
        raw = file.read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:
            raise CheckpointError(f"{file} is not a tokenizer ({error}); restore it from the checkpoint") from None
        beside = path / "tokenizer_config.json"
        try:
            config = json.loads(beside.read_text("utf-8")) if beside.exists() else {}
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{beside} is not valid JSON ({error}); restore it from the checkpoint") from None
        template = path / "chat_template.jinja"
        if template.exists():
            config["chat_template"] = template.read_text("utf-8")
        return cls(backend, config, hashlib.sha256(raw).hexdigest()[:16])

    def with_template(self, template: str | Path) -> Tokenizer:
        """The same tokenizer with another chat template.

        Args:
            template: A file that holds it, or the template itself: a text with a brace in it.

        Returns:
            A new tokenizer; ids and fingerprint are the same.

        Raises:
            UserError: There is no such file, or it is not UTF-8.
        """
        if not isinstance(template, (str, Path)):
            raise UserError(f"chat_template of type {type(template).__name__} is not valid: give a file or a template")
        text = str(template)
        if isinstance(template, Path) or "{" not in text:
            file = Path(template)
            if not file.is_file():
                raise UserError(f"chat_template={text!r} is not valid: there is no such file; give a Jinja template")
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError:
                raise UserError(f"chat_template={str(file)!r} is not UTF-8 text: convert it") from None
        return Tokenizer(self.backend, {**self.config, "chat_template": text}, self.fingerprint)

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template marks what the assistant generates with {% generation %}."""
        template = self.config.get("chat_template")
        return isinstance(template, str) and _GENERATION.search(template) is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> list[int]:
        """Ids of special tokens, ascending."""
        return sorted(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def special_texts(self) -> list[str]:
        """Texts of special tokens, by ascending id."""
        return [token.content for _, token in sorted(self.backend.get_added_tokens_decoder().items()) if token.special]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised, none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left visible."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of every token alone; bytes of a split character show as the replacement character."""
        return [self.backend.decode([i], skip_special_tokens=False) for i in ids]

    @cached_property
    def _template(self) -> Any:
        source = self.config.get("chat_template")
        if not isinstance(source, str):
            raise UserError("this checkpoint has no chat_template: give plain text, or add chat_template.jinja to it")
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        owner = self

        class Generation(Extension):
            """Lets templates mark assistant text with {% generation %}; the marks become sentinels."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                from jinja2 import nodes

                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                opening, closing = owner._marks
                return f"{opening}{caller()}{closing}"

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise UserError(f"the chat template refuses this conversation: {message}")

        env.globals["raise_exception"] = refuse
        env.filters["tojson"] = lambda x, **kw: json.dumps(x, **{"ensure_ascii": False, **kw})
        try:
            return env.from_string(source)
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template of this checkpoint is not valid Jinja ({error}); restore it") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[tuple[str, bool]]:
        """Render a conversation with the checkpoint's template.

        Args:
            messages: Mappings with "role" and "content".
            add_generation_prompt: End with the opening of an assistant turn.
            tools: Descriptions of tools for the template; None for none.
            variables: What else the template is given, by name, such as enable_thinking.

        Returns:
            Spans (text, generated): generated is True inside {% generation %} marks.

        Raises:
            UserError: There is no template, or it refuses the conversation.
        """
        from jinja2 import TemplateError

        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"message {i} is {message!r}: each message must be a mapping with a role and a content")
        tokens = {
            name: self.config[name]["content"] if isinstance(self.config.get(name), dict) else self.config.get(name)
            for name in ("bos_token", "eos_token", "pad_token")
        }
        template = self._template
        said = [list(messages), tools, dict(variables or {})]
        written = self.config["chat_template"] + json.dumps(said, ensure_ascii=False, default=str)
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in written)  # private use area
        self._marks = opening, closing = next(free), next(free)
        try:
            given = {**tokens, **(variables or {}), "messages": messages, "tools": tools}
            text = template.render(add_generation_prompt=add_generation_prompt, **given)
        except (TemplateError, TypeError) as error:
            raise UserError(f"the chat template fails on this conversation ({error}): check its messages") from None
        spans: list[tuple[str, bool]] = []
        for i, piece in enumerate(text.split(opening)):
            inside, _, outside = piece.partition(closing) if i else ("", "", piece)
            spans += [(inside, True)] if inside else []
            spans += [(outside, False)] if outside else []
        return spans
