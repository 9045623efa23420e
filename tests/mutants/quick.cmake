# Included after project() by mutants.py: a mutant changes one source, and that one alone is to be compiled again.
cmake_language(DEFER CALL set_target_properties fsdp PROPERTIES UNITY_BUILD OFF)
