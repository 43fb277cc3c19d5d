"""Prints the notices of the run, and how many there are."""

import mgpurun

notices = mgpurun.init().notices
for notice in notices:
    print("notice:", notice)
print(len(notices), "notices")
