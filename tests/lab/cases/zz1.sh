# crash
echo c >/proc/sysrq-trigger
sleep 5
