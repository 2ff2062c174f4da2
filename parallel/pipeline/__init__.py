"""Pipeline parallelism: units, planner, schedules, checker, simulator and executor."""
