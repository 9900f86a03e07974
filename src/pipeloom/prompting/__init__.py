"""`pipeloom generate`: prompts from the command line, through a pipeline of ranks on this machine.

order.py        what was asked, checked before any rank starts
models.py       a run folder, a folder of transformers, or smollm2, opened by each rank
characters.py   the GPT that `pipeloom train` trains
rank.py         one rank; launch.py starts them
show.py         texts as they come, and the figures at the end
"""
