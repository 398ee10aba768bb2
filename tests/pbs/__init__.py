"""A stand-in for OpenPBS on one machine, for tests and for a try at a desk: see `standin.PbsJob`.

standin.py  PbsJob, what tests use; a command line
job.py      what qsub and the server decided, as data, and the environments that follow; pure
mom.py      the MoM: one small daemon per job that owns all sessions on all pretended hosts
task.py     what runs on a pretended host: becoming a task
proc.py     reads /proc
tm.py       the task API's client side, for the commands
bin/        pbsdsh, pbs_tmrsh, qdel, qstat. `pbs_attach` is absent on purpose

"PBS 23.06: ..." in a comment is what was seen on a real OpenPBS 23.06.06. What was never seen is refused (exit 99),
not guessed.
"""
