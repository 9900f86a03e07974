"""Generation through a pipeline: any language model, cut by stages, many prompts under way at once.

gen = pipeloom.generation.compile(model, spec=None, strategy=Strategy(pp_degree=2), words=words)
for token in gen.stream(prompts, max_new_tokens=64, temperature=0.8, seed=7):
    print(token.text, end="")

spec.py          what a model must say: a step, and its cache                   GenerationSpec, recomputing
step_graph.py    the step as a graph with symbolic sizes, for prompts and for single tokens
chunks.py        the graph cut by weights read; who owns which part of the cache
cutting.py       the same for all stages; a rank's Stage, with its weights alone
stage.py         one step of one scope
request.py       prompts and their limits, checked                              Limits, Result, Token
sampling.py      which token comes next: transformers' processors, a generator a prompt
passage.py       what each rank knows of a scope under way
running.py       what the tasks do
stream_graph.py  the fleet graph that they make up
stream.py        tokens as they come                                            Stream, StreamError
pipeline.py      compile, Generator
transformers.py  the adapter for models of transformers, and their tokenizers   hub_spec, HubWords
smollm2.py       a small model to try it with, out of a package                 fetch
"""

from .pipeline import Generator, LocalGenerator, compile, compile_local
from .request import Limits, Result, Token, Words, Writer
from .spec import GenerationError, GenerationSpec, recomputing
from .stream import RankFigures, Stream, StreamError, StreamFigures

__all__ = [
    "GenerationError",
    "GenerationSpec",
    "Generator",
    "Limits",
    "LocalGenerator",
    "RankFigures",
    "Result",
    "Stream",
    "StreamError",
    "StreamFigures",
    "Token",
    "Words",
    "Writer",
    "compile",
    "compile_local",
    "recomputing",
]
