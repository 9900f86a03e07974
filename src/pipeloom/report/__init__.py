"""What a person sees of a step and of a run: console, trace, timeline page.

Everything here reads Timelines and StepFigures (schedules/timeline.py), predicted or measured alike, and
needs no torch.

    figures    a step's figures in words, for the console and the page
    trace      Chrome trace events, for Perfetto
    timeline   one self-contained HTML page, predicted above measured
    console    the live table of a training run, and what it prints at its end
"""
