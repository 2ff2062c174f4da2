"""Pipeline parallelism: units, planner, schedules, checker, simulator and executor.

``units`` and ``layout`` place the model, ``planner`` chooses a placement from ``cost``,
``schedules`` orders the compute actions, ``lowering`` completes them to the static lists of
``actions``, ``checker`` proves the lists, ``simulate`` times them, ``timeline`` draws them;
``executor`` runs them over ``links``, driving the modules that ``stage`` describes.  Only ``links``
and ``executor`` use torch.distributed; everything before them is plain Python for any number of
ranks.
"""
