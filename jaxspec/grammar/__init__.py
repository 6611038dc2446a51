"""Grammars of generated text as finite tables over tokens; see `compile_grammar`."""

from jaxspec.grammar.automaton import GrammarError
from jaxspec.grammar.compiling import Grammar, compile_grammar
from jaxspec.grammar.table import TokenTable

__all__ = ["Grammar", "GrammarError", "TokenTable", "compile_grammar"]
