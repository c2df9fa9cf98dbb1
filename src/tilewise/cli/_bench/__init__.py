"""The parts of ``tilewise bench``.

``cases`` (what is timed), ``providers`` and ``seed`` (who is timed), ``truth`` (is the answer right), ``worker`` (one process
for each provider), ``sampler`` (clock and power), ``runner`` (the schedule), ``report`` (table and picture).
"""
